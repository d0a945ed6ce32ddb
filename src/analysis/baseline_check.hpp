#pragma once
// A dump's norms and findings against a baseline: exact and approximate items, and what that makes of them.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "gradclip/analysis/baseline.hpp"
#include "gradclip/analysis/entry_pairs.hpp"

namespace gradclip {

/// What an item expects or finds: nothing, a truth, a count, a number, a type, a shape.
using CheckValue = std::variant<std::monostate, bool, std::uint64_t, double, std::string, std::vector<std::int64_t>>;

enum class CheckStatus : std::uint8_t { passed, failed, changed };
[[nodiscard]] std::string_view name(CheckStatus status) noexcept;

/// One value of a parameter, or of the whole model.
struct CheckItem {
  /// "nonfinite", "present", "shape", "dtype", "elements", "zeros", "nan", "posinf", "neginf", "norm", "max_abs"
  std::string_view what;
  CheckStatus status = CheckStatus::passed;
  CheckValue expected;
  CheckValue found;
  /// Numbers and counts: |found - expected| / |expected|; infinite where a number is not finite or `expected` is 0.
  std::optional<double> deviation = std::nullopt;
  std::optional<double> allowed = std::nullopt;  ///< the largest |found - expected| that passes
};

struct CheckedEntry {
  std::string name;       ///< empty: the whole model
  bool compared = false;  ///< whether with a baseline
  EntryPlace place = {};  ///< among those of its name, if compared
  std::vector<CheckItem> items;

  [[nodiscard]] bool passed() const noexcept;
  /// Whether that item did not.
  [[nodiscard]] bool failed(std::string_view what) const noexcept;
};

/// A finding that the baseline has, too: no news.
struct KnownFinding {
  BaselineFinding finding;
  bool seen = true;  ///< false: the dump no longer has it
};

enum class CheckOutcome : std::uint8_t {
  passed,
  regressed,
  no_baseline,
  conditions_differ,  ///< measured otherwise than the baseline: nothing was compared
  updated,            ///< the baseline is to be written
  unchanged,          ///< --update, and it says the same already
};
[[nodiscard]] std::string_view name(CheckOutcome outcome) noexcept;

struct CheckOptions {
  std::optional<double> relative = std::nullopt;  ///< in place of the baseline's own tolerance; its rules keep theirs
  std::optional<double> absolute = std::nullopt;
  bool update = false;
  bool allow_nonfinite = false;  ///< NaN and infinities are counts like others
};

struct CheckResult {
  CheckOutcome outcome = CheckOutcome::passed;
  std::string path;                            ///< of the baseline
  BaselineConditions conditions;               ///< of the dump
  std::optional<BaselineConditions> recorded;  ///< of the baseline; empty where it was not read or is not there
  std::optional<std::int64_t> recorded_step;   ///< likewise
  std::optional<BaselineTolerance> tolerance;  ///< for names that no rule matches; likewise
  std::vector<CheckedEntry> entries;           ///< the whole model, parameters in model order, those that are gone
  std::vector<KnownFinding> known;             ///< in the baseline's order
  std::vector<std::string> unused_patterns;    ///< rules that apply to no parameter
  std::vector<Finding> changes;                ///< --update: what is new in the baseline, worst first
  std::vector<Finding> findings;               ///< why it did not pass, worst first
  std::optional<Baseline> next;                ///< updated: what to write
  bool update_refused = false;                 ///< --update, and the values are not ones to write

  [[nodiscard]] bool passes() const noexcept { return findings.empty(); }
};

/// The verdict. NaN and infinities come first: with them (unless allowed) the baseline is not even read.
/// Errors: as read_baseline().
[[nodiscard]] CheckResult check_against(const std::filesystem::path& file, const Baseline& measured,
                                        const std::vector<Finding>& findings, const CheckOptions& options);

/// The same with the baseline read. @param recorded  null: there is none
[[nodiscard]] CheckResult check_against(const Baseline* recorded, const Baseline& measured,
                                        const std::vector<Finding>& findings, const CheckOptions& options);

/// What is wrong with an entry: "missing", "extra", "shape", "dtype" or "differs" (`value` the largest deviation).
/// @pre it did not pass, for another reason than NaN or infinities
[[nodiscard]] Finding finding_of(const CheckedEntry& entry);

/// "norm 1.5, baseline 1.25 (off by 0.25, 20 %, allowed 1.25e-06)": the items that did not pass.
[[nodiscard]] std::string explain(const CheckedEntry& entry);

/// A value for people: "24", "0.1", "bfloat16", "16x24".
[[nodiscard]] std::string text_of(const CheckValue& value);

}  // namespace gradclip
