#pragma once
// One pass over a list of tasks: what its workers share and what each of them does with a block. Inside of the room.

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "gradclip/stream/block_cutter.hpp"
#include "gradclip/stream/kept_tasks.hpp"
#include "gradclip/stream/shard_stream.hpp"

namespace gradclip {

/// Where one block lies while it is worked on.
struct StreamSlot {
  StreamBlock block;
  Buffer staging;  ///< where the file is read to and written from: host memory, pinned with a device
  Buffer working;  ///< a device's counterpart of staging; pieces of shards that it keeps leave their place here empty
  Buffer results;  ///< ChunkStatistics in the working space
  Buffer results_on_host;  ///< with a device: pinned
  std::vector<RankFile::Piece> reads;
  std::vector<Chunk> chunks;
  std::vector<Chunk> measured;              ///< those of tasks that the sink is to hear of
  std::vector<std::uint64_t> fingerprints;  ///< one per measured chunk
};

/// A worker's memory. Allocated once, used by one thread at a time.
struct StreamWorker {
  std::array<StreamSlot, 2> slots;  ///< the second one with a device only
};

class StreamPass {
 public:
  /// A pass that measures. The arguments outlive it.
  StreamPass(ShardStream& stream, std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors,
             const StatisticsRequest& request, const ChunkSink& sink);

  /// Makes it a pass that scales and writes.
  void write_through(std::span<RankFileWriter* const> writers);

  void run();

 private:
  void work(StreamWorker& worker);
  void work_in_turn(StreamSlot& slot);
  void work_overlapped(StreamWorker& worker);

  // The phases of a block.
  void read(StreamSlot& slot);
  void submit(StreamSlot& slot);
  void fingerprint(StreamSlot& slot);
  void wait();
  void hand_on(StreamSlot& slot);

  void upload(StreamSlot& slot);
  void cut_into_chunks(StreamSlot& slot);
  void measure(StreamSlot& slot, std::span<const ScaleFactors> factors);
  void download(StreamSlot& slot);
  void write(StreamSlot& slot);
  void deliver(StreamSlot& slot);

  [[nodiscard]] std::size_t element_size(const Piece& piece) const noexcept;

  ShardStream& stream_;
  Backend& backend_;
  std::span<const ShardTask> tasks_;
  std::span<const ScaleFactors> factors_;
  const StatisticsRequest& request_;
  const ChunkSink& sink_;
  BlockCutter cutter_;
  KeptTasks kept_;
  std::span<RankFileWriter* const> writers_;
  std::vector<RankFileWriter*> distinct_writers_;
  std::vector<ScaleFactors> written_factors_;
  std::atomic<bool> stop_{false};
};

}  // namespace gradclip
