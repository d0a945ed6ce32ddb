#pragma once
// Shards through a backend, block by block, within bounded memory.
//
// On the host every worker thread takes the next block, reads it, has the backend work on it while it is in the cache,
// and hands the result on (or writes it): reading, computing and writing of different blocks overlap by there being
// several workers, and the kernel reads ahead. Nothing is handed from thread to thread, because on a host whose files
// are in the page cache the hand-over of a block from one core's cache to another's costs more than it hides
// (docs/architecture.md).
//
// On a device every worker has two slots: while the device works on the block in one, the worker reads the next block
// into the other, and while it works on that, the worker writes the first. Shards that were measured stay on the device
// as far as they fit (gradient_storage.hpp).

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/stream/gradient_storage.hpp"

namespace gradclip {

struct StreamOptions {
  std::size_t threads = 1;                           ///< on a device fewer where their slots do not fit the budgets
  std::size_t memory_budget = std::size_t{1} << 30;  ///< bytes of this process
  /// Bytes of device memory that slots and kept shards take together; but always the slots of one worker.
  std::size_t device_memory_budget = std::size_t{1} << 30;
  /// Passes take one model part after another, and the parts wait for theirs in host memory (training/offload.hpp).
  bool offload = false;
  /// Bytes of gradients per block. 0: 1 MiB on the host, which keeps a block in a core's second-level cache together
  /// with its result; 4 MiB on a device, where a block has to be worth the calls.
  std::size_t block_bytes = 0;
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
  std::int64_t model_part = 0;         ///< of the parameter
  bool fingerprint = false;            ///< whether the stored bytes are to be hashed
  bool measured = true;                ///< whether the sink is to hear of it
  bool shown = false;                  ///< whether the stored sink is to see its elements
};

/// Seconds that all workers of this process spent, added up.
struct StreamTimes {
  double read = 0.0;
  double compute = 0.0;  ///< with what was waited for the device
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

/// Some of a task's elements as the dump has them, in host memory, whatever the device.
struct StoredElements {
  std::size_t task;
  const std::byte* data;
  std::uint64_t count;
};

/// Receives every element of the tasks that are shown once, in any order, from `worker` (below the number of threads)
/// one call at a time: for what is counted on the host. While a device works on the same block.
using StoredSink = std::function<void(std::size_t worker, const StoredElements&)>;

struct StreamWorker;

/// One pass at a time.
class ShardStream {
 public:
  ShardStream(Backend& backend, const StreamOptions& options);
  ~ShardStream();
  ShardStream(const ShardStream&) = delete;
  ShardStream& operator=(const ShardStream&) = delete;

  /// Statistics of every task's scaled values. On a device, shards are kept while there is room.
  /// @param stored  sees the elements of the tasks that are shown; may be empty
  void measure(std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors,
               const StatisticsRequest& request, const ChunkSink& sink, const StoredSink& stored = {});

  /// Scales every task's values and writes them through its writer. `sink` receives the statistics of what was written
  /// (no fingerprints); empty: not measured. Kept shards are scaled where they are and freed once they are written.
  /// @param writers  one per task.
  void scale(std::span<const ShardTask> tasks, std::span<RankFileWriter* const> writers,
             std::span<const ScaleFactors> factors, const StatisticsRequest& request, const ChunkSink& sink);

  /// What lies between passes; always empty where the backend works in host memory. Not while a pass runs.
  [[nodiscard]] GradientStorage& storage() noexcept { return storage_; }

  /// As given, but for block_bytes and threads, which are what is used.
  [[nodiscard]] const StreamOptions& options() const noexcept { return options_; }
  [[nodiscard]] bool on_host() const noexcept { return space_ == MemorySpace::host; }
  /// Bytes of device memory that all workers' slots take.
  [[nodiscard]] std::size_t slot_bytes() const noexcept;
  [[nodiscard]] StreamTimes times() const noexcept;
  /// Bytes of gradients that were read from files.
  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return bytes_read_; }

 private:
  friend class StreamPass;

  /// Makes the first `count` workers' slots; they stay.
  void prepare_workers(std::size_t count);

  Backend& backend_;
  MemorySpace space_;
  StreamOptions options_;
  GradientStorage storage_;
  std::vector<std::unique_ptr<StreamWorker>> workers_;
  std::atomic<std::int64_t> read_nanoseconds_{0};
  std::atomic<std::int64_t> compute_nanoseconds_{0};
  std::atomic<std::int64_t> write_nanoseconds_{0};
  std::atomic<std::uint64_t> bytes_read_{0};
};

}  // namespace gradclip
