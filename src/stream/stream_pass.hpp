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
  std::size_t number = 0;
  std::array<StreamSlot, 2> slots;  ///< the second one with a device only
};

class StreamPass {
 public:
  /// A pass that measures. The arguments outlive it.
  StreamPass(ShardStream& stream, std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors,
             const StatisticsRequest& request, const ChunkSink& sink);

  /// Has a pass that measures also show its stored elements. The sink outlives it.
  void show_stored(const StoredSink& sink) { stored_sink_ = &sink; }

  /// Makes it a pass that scales and writes.
  void write_through(std::span<RankFileWriter* const> writers);

  void run();

 private:
  void work(StreamWorker& worker);
  void work_in_turn(StreamWorker& worker);
  void work_overlapped(StreamWorker& worker);

  // The phases of a block.
  void read(StreamSlot& slot);
  void submit(StreamSlot& slot);
  void fingerprint(StreamSlot& slot);
  void show(const StreamSlot& slot, std::size_t worker);
  void wait();
  void hand_on(StreamSlot& slot);

  void upload(StreamSlot& slot);
  void cut_into_chunks(StreamSlot& slot);
  void measure(StreamSlot& slot, std::span<const ScaleFactors> factors);
  void download(StreamSlot& slot);
  void write(StreamSlot& slot);
  void deliver(StreamSlot& slot);

  /// Whether the host works on the task's stored bytes too.
  [[nodiscard]] bool host_needs(const ShardTask& task) const noexcept;
  /// Where it finds those of a piece. @pre a pass that measures; the piece was read, or is kept in host memory
  [[nodiscard]] const std::byte* stored(const StreamSlot& slot, const Piece& piece) const noexcept;
  [[nodiscard]] std::size_t element_size(const Piece& piece) const noexcept;

  ShardStream& stream_;
  Backend& backend_;
  std::span<const ShardTask> tasks_;
  std::span<const ScaleFactors> factors_;
  const StatisticsRequest& request_;
  const ChunkSink& sink_;
  const StoredSink* stored_sink_ = nullptr;
  BlockCutter cutter_;
  KeptTasks kept_;
  std::span<RankFileWriter* const> writers_;
  std::vector<RankFileWriter*> distinct_writers_;
  std::vector<ScaleFactors> written_factors_;
  std::atomic<bool> stop_{false};
};

}  // namespace gradclip
