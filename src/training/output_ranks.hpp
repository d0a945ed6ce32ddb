#pragma once
// The rank files of an output that grow at the same time, and the shards that are reduced once for all that keep them.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/dump/new_rank_file.hpp"
#include "gradclip/training/microbatches.hpp"
#include "gradclip/training/reduction_plan.hpp"
#include "gradclip/writing/joint_dump.hpp"

namespace gradclip {

/// What several ranks keep of the same sum: the same bytes in each of their files.
struct ReducedShard {
  struct Copy {
    std::size_t output;    ///< which of the rank files
    std::size_t gradient;  ///< which of its gradients
  };

  std::size_t parameter = 0;
  ShardLayout kept;
  std::shared_ptr<const std::vector<std::int32_t>> addends;  ///< as ReductionPlan::addends, not null
  std::vector<Copy> copies;
  std::uint64_t done = 0;            ///< elements that were written
  std::optional<Checksum> checksum;  ///< of these; none before the first
};

class OutputRanks {
 public:
  /// Borrowed. @param dumps  ordered
  OutputRanks(const MicrobatchDumps& dumps, const std::vector<ReductionPlan>& plans)
      : dumps_(dumps), manifest_(dumps[0]->manifest()), plans_(plans) {}

  /// Begins anew, with the first of these ranks: with as many as can be described in `memory` bytes, at least one; with
  /// one alone where nothing is reduced, since then they have nothing in common.
  /// @return how many it took
  std::size_t take(std::span<const std::int32_t> ranks, std::size_t memory);
  /// Makes their rank files, labels included. @pre take()
  void create(DumpWriter& writer);
  /// The next elements of a shard into all files that have it. Thread-safe for different shards.
  void append(ReducedShard& shard, std::span<const std::byte> stored);
  /// @pre everything was appended
  [[nodiscard]] std::vector<WrittenRank> finish(const DumpWriter& writer);

  [[nodiscard]] std::vector<ReducedShard>& shards() noexcept { return shards_; }
  /// Ranks whose files they come from, ascending.
  [[nodiscard]] const std::vector<std::int32_t>& inputs() const noexcept { return inputs_; }

  /// Of the gradients in all files that were created so far.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  /// Whether any of these ranks has labels.
  [[nodiscard]] bool labelled() const noexcept { return labelled_; }
  /// Those of them that hold labels of some microbatches only.
  [[nodiscard]] const std::vector<std::int32_t>& without_labels() const noexcept { return without_labels_; }

 private:
  struct Output {
    std::int32_t rank = 0;
    NewRankFile made;
    std::vector<std::uint64_t> checksums;
  };
  struct Sum {
    std::shared_ptr<const std::vector<std::int32_t>> addends;
    bool none = true;  ///< all addends of all microbatches
  };
  using OfRank = std::pair<std::size_t, std::int32_t>;  // parameter, the first of ranks

  std::size_t describe(std::int32_t rank);
  void find_gradients();
  [[nodiscard]] Sum* sum_of(std::size_t parameter, std::int32_t rank);
  [[nodiscard]] bool none(std::size_t parameter, std::int32_t rank) const;
  void create(std::int32_t rank, DumpWriter& writer);

  const MicrobatchDumps& dumps_;
  const Manifest& manifest_;
  const std::vector<ReductionPlan>& plans_;
  std::vector<std::int32_t> ranks_;
  std::vector<std::int32_t> inputs_;
  std::map<OfRank, Sum> sums_;              // by the first addend
  std::map<OfRank, std::size_t> shard_of_;  // by the first rank that keeps it
  std::vector<ReducedShard> shards_;
  std::vector<Output> outputs_;
  std::uint64_t bytes_ = 0;
  bool labelled_ = false;
  std::vector<std::int32_t> without_labels_;
};

}  // namespace gradclip
