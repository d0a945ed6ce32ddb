#pragma once
// Recorded norms as a file that is committed beside the code: what a dump measured, what it was measured under, and how
// far later dumps may be off. docs/command-line.md describes the file.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/base/dtype.hpp"
#include "gradclip/base/finding.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/norm/total_norm.hpp"

namespace gradclip {

inline constexpr int kBaselineVersion = 1;

/// The most rules that a baseline may have: each holds a compiled expression.
inline constexpr std::size_t kMostToleranceRules = 1000;

/// A number x fits a recorded b when |x - b| <= absolute + relative × |b|.
struct BaselineTolerance {
  double relative = 1e-6;
  double absolute = 0.0;
  double zeros = 0.0;  ///< relative, of how many elements are zero; 0: that many exactly
};

/// Another tolerance for the names that an expression matches; what it leaves empty is the baseline's own.
struct ToleranceRule {
  std::string pattern;
  std::optional<double> relative;
  std::optional<double> absolute;
  std::optional<double> zeros;
};

/// What numbers mean: those measured under other conditions are not compared.
struct BaselineConditions {
  double norm_type = 2.0;
  std::string numerics;  ///< whose arithmetic was taken, as --numerics takes it
  std::optional<double> label_token_divisor;
  std::optional<double> expert_divisor;
};

/// Of a parameter, or of the whole model.
struct BaselineNumbers {
  std::uint64_t elements = 0;
  std::uint64_t zeros = 0;
  std::uint64_t nan = 0;
  std::uint64_t posinf = 0;
  std::uint64_t neginf = 0;
  double norm = 0.0;
  double max_abs = 0.0;  ///< largest finite magnitude

  [[nodiscard]] std::uint64_t nonfinite() const noexcept { return nan + posinf + neginf; }
};

struct BaselineParameter {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::float32;
  BaselineNumbers numbers;
  bool counted = true;  ///< false: a later entry of a tied weight, which is no part of the total
};

/// A finding that a dump may have, as bad as this.
struct BaselineFinding {
  std::string kind;
  std::string parameter = {};                  ///< empty where it concerns the whole dump
  std::vector<std::int32_t> ranks = {};        ///< ascending
  std::optional<double> value = std::nullopt;  ///< as Finding's
};

struct Baseline {
  std::optional<std::int64_t> step;  ///< of the dump; for people
  BaselineConditions conditions;
  BaselineTolerance tolerance;
  std::vector<ToleranceRule> rules;  ///< the first that matches anywhere in a name applies
  BaselineNumbers total;
  std::vector<BaselineParameter> parameters;  ///< in model order; a name may stand several times
  std::vector<BaselineFinding> findings;
};

/// What a dump measured, with default tolerances and without rules.
[[nodiscard]] Baseline baseline_of(const Manifest& manifest, const NormResult& result, BaselineConditions conditions);

/// Empty if there is no such file. Errors: Error(bad_input) for whatever is wrong with it, Error(resources) if it
/// cannot be read.
[[nodiscard]] std::optional<Baseline> read_baseline(const std::filesystem::path& file);

/// Errors: Error(bad_input) beginning with `where`: text that is no JSON document within the reader's limits, another
/// format or version, unknown and missing keys, values of the wrong type or range, by their path in the document.
[[nodiscard]] Baseline parse_baseline(const std::string& text, const std::string& where);

/// The file's content: one line a parameter, the shortest numbers that read back to the same bits, ASCII only.
[[nodiscard]] std::string baseline_text(const Baseline& baseline);

}  // namespace gradclip
