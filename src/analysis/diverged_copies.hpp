#pragma once
// Parameters of which a dump's own copies are not the same: how they differ, and whether they are addends in truth.

#include <array>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "gradclip/analysis/block_comparison.hpp"
#include "gradclip/norm/statistics.hpp"

namespace gradclip {

/// How copies of one side differ in one block. Trivially copyable: it travels.
struct CopyDifference {
  std::uint64_t block = 0;  ///< index into the round
  std::uint32_t side = 0;
  std::int32_t first_rank = -1;  ///< whose copy is the first that is different
  std::uint64_t first = kNowhere;
  double largest = 0.0;
  std::int32_t nan_rank = -1, number_rank = -1;  ///< the first NaN that met a number
  std::uint64_t absent = 0;                      ///< elements that are None in a copy and not in another
  /// Over the elements that are not the same in all copies, squares of (sum of the copies - the other dump's value), of
  /// (their mean - it), of (the copy that counts - it), of it. NaN where nothing is summed.
  double sum_apart = 0.0, mean_apart = 0.0, counted_apart = 0.0, other = 0.0;

  [[nodiscard]] bool any() const noexcept { return first != kNowhere || absent != 0; }
};

/// Copies of one dump against one another, block by block, and what all processes found of them.
class CopyComparison {
 public:
  explicit CopyComparison(Communicator& comm) : comm_(comm) {}

  /// Before a round of so many blocks.
  void begin(std::size_t blocks);
  /// Compares the copies of one side of block number `index` of the round. Thread-safe for different blocks.
  /// @param values  with the values of all copies
  /// @param other   the other dump's block, which their sum or mean may be; null: there is none
  void compare(std::size_t index, const Block& block, std::uint32_t side, const BlockSide& values,
               const BlockValues* other, BlockAssembly& assembly);
  /// After it. Collective.
  void collect(std::span<const Block> round);

  struct PairFinding {
    std::size_t pair = 0;
    Finding finding;
  };
  /// Kind `replicas-differ`, one for each pair and side where copies differ, in order; the same on every process.
  [[nodiscard]] std::vector<PairFinding> findings(const std::vector<ComparedPair>& pairs, bool two_dumps) const;

 private:
  /// A parameter's copies in one dump, all blocks together.
  struct Merged {
    CopyDifference found;
    std::set<std::int32_t> ranks;
  };

  Communicator& comm_;
  std::vector<std::array<CopyDifference, 2>> of_block_;
  std::vector<std::array<std::vector<std::int32_t>, 2>> ranks_of_block_;
  std::map<std::pair<std::size_t, std::uint32_t>, Merged> merged_;  // by pair and side
};

/// Compares these parameters again, with the values of all copies: the results in `parameters` are replaced (where the
/// copy that counts is None, the next one counts), and copies that differ are findings `replicas-differ`, one for each
/// parameter and dump, in order. A finding says where the sum or the mean of the copies is what the other dump has:
/// what a reduction that never ran leaves. Collective; every process gets the same.
[[nodiscard]] std::vector<Finding> compare_copies(DiffRun& run, const std::vector<ComparedPair>& pairs,
                                                  const std::set<std::size_t>& suspects, std::size_t max_elements,
                                                  std::vector<ParameterDifference>& parameters);

}  // namespace gradclip
