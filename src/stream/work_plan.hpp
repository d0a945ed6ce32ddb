#pragma once
// Which process serves which recorded ranks: a pure function of the manifest and the number of processes.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradclip/dump/manifest.hpp"

namespace gradclip {

/// Recorded ranks by process; each rank has one.
class WorkPlan {
 public:
  /// @param process_of  of every recorded rank, below `processes`
  WorkPlan(std::vector<int> process_of, int processes);

  [[nodiscard]] int processes() const noexcept { return static_cast<int>(first_.size()) - 1; }
  /// Those that the process serves, ascending.
  [[nodiscard]] std::span<const std::int32_t> ranks(int process) const noexcept {
    const auto i = static_cast<std::size_t>(process);
    return std::span(ranks_).subspan(first_[i], first_[i + 1] - first_[i]);
  }
  [[nodiscard]] int process_of(std::int32_t rank) const noexcept { return process_of_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<int> process_of_;
  std::vector<std::int32_t> ranks_;  ///< by process, ascending within one
  std::vector<std::size_t> first_;   ///< of each process in ranks_, and the end
};

/// Bytes of gradients that each recorded rank holds, estimated from the manifest alone: a parameter's bytes divided by
/// the size of its sharding dimensions. O(parameters + ranks × meshes).
[[nodiscard]] std::vector<double> bytes_by_rank(const Manifest& manifest);
/// Entries of the manifest that the rank with the most of them holds.
[[nodiscard]] std::size_t most_parameters_of_a_rank(const Manifest& manifest);

/// Contiguous blocks of recorded ranks, in process order. Balances the estimated bytes: every cut lies where the
/// running sum is nearest to its share. With more processes than recorded ranks some serve none.
[[nodiscard]] WorkPlan plan_work(const Manifest& manifest, int processes);

/// Which recorded ranks' files processes can read, where not all of them see the same (node-local storage).
struct RankSight {
  std::vector<std::vector<std::int32_t>> views;  ///< recorded ranks, ascending
  std::vector<std::size_t> view_of;              ///< of each process: which of the views it has
};

/// Every rank to a process that sees it, balanced by estimated bytes; as plan_work(manifest, processes) where all see
/// all. Ranks that fewer see are placed first.
/// @pre every rank is in a view of some process
[[nodiscard]] WorkPlan plan_work(const Manifest& manifest, const RankSight& sight);

}  // namespace gradclip
