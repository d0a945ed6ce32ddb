#pragma once
// Which process serves which recorded ranks: a pure function of the manifest and the number of processes.

#include <cstdint>
#include <vector>

#include "gradclip/dump/manifest.hpp"

namespace gradclip {

/// Contiguous blocks of recorded ranks, in process order.
class WorkPlan {
 public:
  /// @param first_rank  processes + 1 ascending entries: process i serves [first_rank[i], first_rank[i + 1]).
  explicit WorkPlan(std::vector<std::int32_t> first_rank) : first_rank_(std::move(first_rank)) {}

  [[nodiscard]] int processes() const noexcept { return static_cast<int>(first_rank_.size()) - 1; }
  [[nodiscard]] std::int32_t begin(int process) const noexcept {
    return first_rank_[static_cast<std::size_t>(process)];
  }
  [[nodiscard]] std::int32_t end(int process) const noexcept {
    return first_rank_[static_cast<std::size_t>(process) + 1];
  }
  [[nodiscard]] int process_of(std::int32_t rank) const noexcept;
  /// The most recorded ranks that one process serves.
  [[nodiscard]] std::int32_t most_ranks() const noexcept;

 private:
  std::vector<std::int32_t> first_rank_;
};

/// Bytes of gradients that each recorded rank holds, estimated from the manifest alone: a parameter's bytes divided by
/// the size of its sharding dimensions. O(parameters + ranks × meshes).
[[nodiscard]] std::vector<double> bytes_by_rank(const Manifest& manifest);

/// Balances the estimated bytes: every cut lies where the running sum is nearest to its share. With more processes than
/// recorded ranks some serve none.
[[nodiscard]] WorkPlan plan_work(const Manifest& manifest, int processes);

}  // namespace gradclip
