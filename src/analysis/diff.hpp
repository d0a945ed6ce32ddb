#pragma once
// Two dumps compared in global coordinates, whatever their layouts: block by block, each block by one process, the same
// bits for any number of processes and threads (docs/arithmetic.md).

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "gradclip/analysis/block_exchange.hpp"
#include "gradclip/analysis/compared_pair.hpp"
#include "gradclip/analysis/diff_rule.hpp"
#include "gradclip/analysis/difference.hpp"
#include "gradclip/base/finding.hpp"

namespace gradclip {

struct DiffOptions {
  DiffRule rule;
  std::size_t max_elements = 0;  ///< the worst elements to keep of each parameter
  NameMap names;                 ///< A's names -> B's
  std::optional<NamePattern> only;
};

enum class DiffStatus : std::uint8_t { equal, differs, missing, extra };
[[nodiscard]] std::string_view name(DiffStatus status) noexcept;

/// b / a where it is the same number all over a parameter, as far as its type can tell.
struct ConstantRatio {
  double low = 0.0;
  double high = 0.0;
  bool of_sums = false;  ///< sums over all elements told it: single ones may be off it
};

/// Elements that a ratio does not explain. Trivially copyable: it travels.
struct RatioLeftover {
  std::uint64_t elements = 0;
  std::uint64_t at = kNowhere;  ///< of the one that is furthest from ratio × a; the others are its
  double furthest = 0.0;
  double a = 0.0;
  double b = 0.0;
};

struct ParameterDifference {
  ComparedPair pair;
  DiffStatus status = DiffStatus::equal;
  ElementRule rule;
  Difference found;                 ///< nothing where it was not compared (missing, extra, other shapes)
  std::vector<WorstElement> worst;  ///< the worst first
  std::optional<ConstantRatio> ratio;
  RatioLeftover leftover;  ///< of the number that the ratio was taken for

  [[nodiscard]] bool compared() const noexcept { return pair.status == PairStatus::both; }
  /// |A - B| / |B| in the 2-norm, of what is finite on both sides; infinity where only B is 0.
  [[nodiscard]] double relative_l2() const noexcept;
  [[nodiscard]] std::optional<double> cosine() const noexcept;      ///< empty where a side is 0
  [[nodiscard]] std::optional<double> norm_ratio() const noexcept;  ///< |A| / |B|; empty where B is 0
};

struct DiffResult {
  std::vector<ParameterDifference> parameters;  ///< in A's model order, then what only B has
  std::optional<std::size_t> first;             ///< the first that is not equal, in model order
  std::vector<Finding> findings;                ///< empty: the dumps are equal

  [[nodiscard]] std::size_t count(DiffStatus status) const noexcept;
};

/// Compares raw values: nothing is scaled; float8 is float32(stored × scale_inv); Partial gradients are combined to
/// full values first, addends in coordinate order in float64. None equals None and nothing else. Copies within a dump
/// are compared too (±0 equal, NaN equal to NaN), and are findings where they differ. Collective; every process gets
/// the same result. Errors: as RankFile, BlockAssembly::assemble and compared_pairs.
[[nodiscard]] DiffResult compare_dumps(DiffRun& run, const DiffOptions& options);

}  // namespace gradclip
