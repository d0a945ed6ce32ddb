#pragma once
// The shards of an output replayed: rank file by rank file, where more of them are added up than can be open.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "gradclip/training/output_ranks.hpp"
#include "gradclip/training/window_replay.hpp"

namespace gradclip {

/// What a replay of shards works with. Borrowed; threads are the workers'.
struct ReplayRun {
  const MicrobatchDumps& dumps;
  const std::vector<ReductionPlan>& plans;
  const std::vector<bool>& ends;  ///< the microbatches that end windows
  std::vector<WindowReplay>& workers;
  std::size_t round_bytes;                             ///< that gradients may take which are kept in memory
  const std::function<void(std::uint64_t)>& progress;  ///< as AccumulateRun's
};

/// Replays all shards of the output. Gradients are read block by block, where each is needed, as long as all of their
/// files can be open; else in rounds: each file's part of a round is read into memory, one file after another.
class ReplayRounds {
 public:
  ReplayRounds(const ReplayRun& run, OutputRanks& output);

  void replay();

 private:
  /// Elements of a shard that come next in it.
  struct Portion {
    ReducedShard* shard = nullptr;
    std::uint64_t elements = 0;
    std::uint64_t stride = 0;    ///< bytes in memory of each of its gradients
    std::uint64_t bytes_at = 0;  ///< where the first one's begin; by addend, then microbatch
    std::uint64_t kept_at = 0;   ///< likewise in kept_
  };
  /// A portion's addend, which is a rank's.
  struct Visit {
    std::int32_t rank;
    std::uint32_t addend;
    std::size_t portion;
  };

  void begin_round(std::size_t& first);
  [[nodiscard]] std::uint64_t bytes_per_element(const ReducedShard& shard) const;
  void read_round();
  void read_rank(std::size_t first, std::size_t last);
  void replay(const Portion& portion, WindowReplay& worker);
  [[nodiscard]] std::optional<MicrobatchGradient> copy(const Portion& portion, std::size_t addend,
                                                       std::size_t microbatch, std::uint64_t first, std::uint64_t count,
                                                       std::byte* to) const;
  [[nodiscard]] std::optional<MicrobatchGradient> read(const RankFile& file, std::size_t microbatch,
                                                       const ReducedShard& shard, std::uint64_t first,
                                                       std::uint64_t count, std::byte* to) const;

  ReplayRun run_;
  OutputRanks& output_;
  bool keeps_;
  std::vector<Portion> round_;
  std::vector<Visit> visits_;  // by rank
  std::vector<std::byte> bytes_;
  std::vector<std::optional<MicrobatchGradient>> kept_;
};

}  // namespace gradclip
