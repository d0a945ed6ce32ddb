#pragma once
// Shards through a backend, block by block, within bounded memory.
//
// Every worker thread takes the next block, reads it, has the backend work on it while it is in the cache, and hands
// the result on (or writes it): reading, computing and writing of different blocks overlap by there being several
// workers, and the kernel reads ahead. Nothing is handed from thread to thread, because on a host whose files are in
// the page cache the hand-over of a block from one core's cache to another's costs more than it hides
// (docs/architecture.md).

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/dump/dump_writer.hpp"

namespace gradclip {

struct StreamOptions {
  std::size_t threads = 1;
  std::size_t memory_budget = std::size_t{1} << 30;  ///< bytes of this process
  /// Bytes of gradients per block; the default keeps a block in a core's second-level cache together with its result.
  std::size_t block_bytes = std::size_t{1} << 20;
  /// Called with the bytes of every finished block, from any thread. May be empty.
  std::function<void(std::uint64_t)> progress;
};

/// One shard of one recorded rank as the stream works on it.
struct ShardTask {
  std::int32_t rank = 0;
  std::size_t parameter = 0;
  std::shared_ptr<const RankFile> file;
  const StoredShard* shard = nullptr;  ///< owned by file; not None
  std::uint32_t factors = 0;           ///< index into the factors given with the tasks
  bool fingerprint = false;            ///< whether the stored bytes are to be hashed
  bool measured = true;                ///< whether the sink is to hear of it
};

/// Seconds that all workers of this process spent, added up.
struct StreamTimes {
  double read = 0.0;
  double compute = 0.0;
  double write = 0.0;
};

/// A measured chunk as it is handed on: in ascending order of chunks within a task; tasks interleave.
struct MeasuredChunk {
  std::size_t task;
  std::uint64_t position;  ///< of its first element in the shard
  std::uint32_t count;
  ChunkStatistics statistics;
  std::uint64_t fingerprint;  ///< XXH3-64 of the stored bytes, if the task asked for it
};

/// Receives the chunks of a task in order, one call at a time per task, from any thread.
using ChunkSink = std::function<void(const MeasuredChunk&)>;

class ShardStream {
 public:
  ShardStream(Backend& backend, const StreamOptions& options) : backend_(backend), options_(options) {}

  /// Statistics of every task's scaled values.
  void measure(std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors,
               const StatisticsRequest& request, const ChunkSink& sink);

  /// Scales every task's values and writes them through its writer. `sink` receives the statistics of what was written
  /// (no fingerprints); empty: not measured.
  /// @param writers  one per task.
  void scale(std::span<const ShardTask> tasks, std::span<RankFileWriter* const> writers,
             std::span<const ScaleFactors> factors, const StatisticsRequest& request, const ChunkSink& sink);

  [[nodiscard]] const StreamOptions& options() const noexcept { return options_; }
  [[nodiscard]] StreamTimes times() const noexcept;

 private:
  friend class StreamPass;

  Backend& backend_;
  StreamOptions options_;
  std::atomic<std::int64_t> read_nanoseconds_{0};
  std::atomic<std::int64_t> compute_nanoseconds_{0};
  std::atomic<std::int64_t> write_nanoseconds_{0};
};

}  // namespace gradclip
