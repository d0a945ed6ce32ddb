#include "gradclip/stream/shard_stream.hpp"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/worker_pool.hpp"

namespace gradclip {
namespace {

/// Pieces start where vector instructions and devices like them to.
constexpr std::size_t kPieceAlignment = 64;

/// A block is one vectored read.
constexpr std::size_t kMostPieces = 512;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

/// Adds the time until stop() to a counter.
class Stopwatch {
 public:
  explicit Stopwatch(std::atomic<std::int64_t>& total) : total_(total) {}
  ~Stopwatch() {
    total_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  std::atomic<std::int64_t>& total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Hands the chunks of a task that spans several blocks on in order, whichever block is done first.
class TaskOrder {
 public:
  void deliver(std::uint64_t first, std::uint64_t count, std::vector<MeasuredChunk> chunks, const ChunkSink& sink) {
    const std::lock_guard lock(mutex_);
    waiting_.emplace(first, std::pair(count, std::move(chunks)));
    while (!waiting_.empty() && waiting_.begin()->first == next_) {
      auto& [size, ready] = waiting_.begin()->second;
      for (const MeasuredChunk& chunk : ready) sink(chunk);
      next_ += size;
      waiting_.erase(waiting_.begin());
    }
  }

 private:
  std::mutex mutex_;
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, std::pair<std::uint64_t, std::vector<MeasuredChunk>>> waiting_;
};

struct Piece {
  std::size_t task;
  std::uint64_t first;
  std::uint64_t count;
  std::size_t offset;                ///< in the block's buffer
  std::shared_ptr<TaskOrder> order;  ///< null: the task lies in this block alone
};

struct StreamBlock {
  std::vector<Piece> pieces;  ///< all of one rank file
  std::size_t bytes = 0;
};

/// Cuts the tasks into blocks, handed out in ascending order.
class BlockCutter {
 public:
  BlockCutter(std::span<const ShardTask> tasks, std::size_t block_bytes) : tasks_(tasks), block_bytes_(block_bytes) {}

  /// The most bytes a block's buffer can need.
  [[nodiscard]] std::size_t capacity() const noexcept {
    return std::max(block_bytes_, kChunkElements * size_of(DType::float64)) + kMostPieces * kPieceAlignment;
  }

  bool next(StreamBlock& block) {
    const std::lock_guard lock(mutex_);
    block.pieces.clear();
    block.bytes = 0;
    while (task_ < tasks_.size() && block.pieces.size() < kMostPieces && block.bytes < block_bytes_) {
      const ShardTask& task = tasks_[task_];
      if (!block.pieces.empty() && task.file != tasks_[block.pieces.front().task].file) break;
      const std::uint64_t left = task.shard->elements - first_;
      if (left == 0) {
        advance();
        continue;
      }
      const std::uint64_t count = std::min(left, room(block, task.shard->dtype));
      if (count == 0) break;
      if (first_ == 0 && count < left) order_ = std::make_shared<TaskOrder>();
      block.pieces.push_back({task_, first_, count, block.bytes, order_});
      block.bytes += aligned(count * size_of(task.shard->dtype));
      first_ += count;
      if (first_ == task.shard->elements) advance();
    }
    return !block.pieces.empty();
  }

 private:
  /// Whole chunks that still fit; at least one into an empty block.
  [[nodiscard]] std::uint64_t room(const StreamBlock& block, DType dtype) const noexcept {
    const std::size_t free = block_bytes_ - std::min(block_bytes_, block.bytes);
    const std::uint64_t elements = free / size_of(dtype);
    const std::uint64_t whole = elements / kChunkElements * kChunkElements;
    const std::uint64_t left = tasks_[task_].shard->elements - first_;
    if (left <= elements) return left;
    return block.pieces.empty() ? std::max<std::uint64_t>(whole, kChunkElements) : whole;
  }

  void advance() {
    ++task_;
    first_ = 0;
    order_.reset();
  }

  std::span<const ShardTask> tasks_;
  std::size_t block_bytes_;
  std::mutex mutex_;
  std::size_t task_ = 0;
  std::uint64_t first_ = 0;
  std::shared_ptr<TaskOrder> order_;
};

}  // namespace

/// One pass over the tasks: what its workers share and what each of them does with a block.
class StreamPass {
 public:
  StreamPass(ShardStream& stream, std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors,
             const StatisticsRequest& request, const ChunkSink& sink)
      : stream_(stream),
        backend_(stream.backend_),
        tasks_(tasks),
        factors_(factors),
        request_(request),
        sink_(sink),
        space_(backend_.describe().working_space),
        cutter_(tasks, stream.options_.block_bytes) {}

  /// Makes it a pass that scales and writes.
  void write_through(std::span<RankFileWriter* const> writers) {
    writers_ = writers;
    distinct_writers_.assign(writers.begin(), writers.end());
    std::sort(distinct_writers_.begin(), distinct_writers_.end());
    distinct_writers_.erase(std::unique(distinct_writers_.begin(), distinct_writers_.end()), distinct_writers_.end());
    // What was written is measured as it is: only float8's scale_inv still applies.
    for (const ScaleFactors& factor : factors_) {
      ScaleFactors as_written;
      as_written.scale_inv = factor.scale_inv;
      written_factors_.push_back(as_written);
    }
  }

  void run() {
    const std::size_t threads = std::max<std::size_t>(1, stream_.options_.threads);
    parallel_for(threads, threads, [&](std::size_t, std::size_t) {
      try {
        work();
      } catch (...) {
        // Whoever waits for this worker's pieces ends with its error.
        if (!stop_.exchange(true)) {
          for (RankFileWriter* writer : distinct_writers_) writer->cancel(std::current_exception());
        }
        throw;
      }
    });
  }

 private:
  struct Worker {
    StreamBlock block;
    Buffer staging;  ///< where the file is read to and written from
    Buffer working;  ///< where the backend works; unused if that is host memory
    Buffer results;
    std::vector<RankFile::Piece> reads;
    std::vector<Chunk> chunks;
    std::vector<Chunk> measured;              ///< those of tasks that the sink is to hear of
    std::vector<ChunkStatistics> statistics;  ///< one per measured chunk
    std::vector<std::uint64_t> fingerprints;  ///< likewise
  };

  void work() {
    Worker worker;
    const bool on_host = space_ == MemorySpace::host;
    while (!stop_ && cutter_.next(worker.block)) {
      if (worker.staging.size() == 0) {
        worker.staging = backend_.allocate(cutter_.capacity(), on_host ? MemorySpace::host : MemorySpace::pinned);
        if (!on_host) worker.working = backend_.allocate(cutter_.capacity(), space_);
      }
      read(worker);
      {
        const Stopwatch watch(stream_.compute_nanoseconds_);
        if (!on_host) move(worker.staging, worker.working, worker.block.bytes);
        cut_into_chunks(worker);
        if (writers_.empty()) {
          measure(worker, factors_);
        } else {
          backend_.scale({worker.chunks, factors_});
          if (sink_) measure(worker, written_factors_);
          if (!on_host) move(worker.working, worker.staging, worker.block.bytes);
        }
      }
      write(worker);
      if (sink_) deliver(worker);
      if (stream_.options_.progress) stream_.options_.progress(worker.block.bytes);
    }
  }

  void read(Worker& worker) {
    const Stopwatch watch(stream_.read_nanoseconds_);
    worker.reads.clear();
    for (const Piece& piece : worker.block.pieces) {
      worker.reads.push_back(
          {tasks_[piece.task].shard, piece.first, piece.count, worker.staging.data() + piece.offset});
    }
    tasks_[worker.block.pieces.front().task].file->read(worker.reads);
  }

  void cut_into_chunks(Worker& worker) {
    std::byte* const base = space_ == MemorySpace::host ? worker.staging.data() : worker.working.data();
    worker.chunks.clear();
    worker.measured.clear();
    worker.fingerprints.clear();
    for (const Piece& piece : worker.block.pieces) {
      const ShardTask& task = tasks_[piece.task];
      const std::size_t size = size_of(task.shard->dtype);
      for (std::uint64_t at = 0; at < piece.count; at += kChunkElements) {
        const auto count = static_cast<std::uint32_t>(std::min<std::uint64_t>(kChunkElements, piece.count - at));
        worker.chunks.push_back({base + piece.offset + at * size, count, task.shard->dtype, task.factors});
        if (!task.measured) continue;
        worker.measured.push_back(worker.chunks.back());
        const std::byte* stored = worker.staging.data() + piece.offset + at * size;
        worker.fingerprints.push_back(task.fingerprint ? XXH3_64bits(stored, count * size) : 0);
      }
    }
  }

  void measure(Worker& worker, std::span<const ScaleFactors> factors) {
    if (worker.measured.empty()) return;
    const std::size_t bytes = worker.measured.size() * sizeof(ChunkStatistics);
    if (worker.results.size() < bytes) worker.results = backend_.allocate(bytes, space_);
    const Bytes results = worker.results.bytes().subspan(0, bytes);
    backend_.statistics({worker.measured, factors}, request_, results);
    worker.statistics.resize(worker.measured.size());
    backend_.move(results, {reinterpret_cast<std::byte*>(worker.statistics.data()), bytes, MemorySpace::host});
  }

  void write(Worker& worker) {
    if (writers_.empty()) return;
    const Stopwatch watch(stream_.write_nanoseconds_);
    for (const Piece& piece : worker.block.pieces) {
      writers_[piece.task]->write(tasks_[piece.task].parameter, piece.first, piece.count,
                                  worker.staging.data() + piece.offset);
    }
  }

  void deliver(Worker& worker) {
    std::size_t chunk = 0;
    for (const Piece& piece : worker.block.pieces) {
      if (!tasks_[piece.task].measured) continue;
      std::vector<MeasuredChunk> measured;
      for (std::uint64_t at = 0; at < piece.count; at += kChunkElements, ++chunk) {
        measured.push_back({piece.task, piece.first + at, worker.measured[chunk].count, worker.statistics[chunk],
                            worker.fingerprints[chunk]});
      }
      if (piece.order) {
        piece.order->deliver(piece.first, piece.count, std::move(measured), sink_);
      } else {
        for (const MeasuredChunk& one : measured) sink_(one);
      }
    }
  }

  void move(const Buffer& from, const Buffer& to, std::size_t bytes) {
    backend_.move(from.bytes().subspan(0, bytes), to.bytes().subspan(0, bytes));
  }

  ShardStream& stream_;
  Backend& backend_;
  std::span<const ShardTask> tasks_;
  std::span<const ScaleFactors> factors_;
  const StatisticsRequest& request_;
  const ChunkSink& sink_;
  MemorySpace space_;
  BlockCutter cutter_;
  std::span<RankFileWriter* const> writers_;
  std::vector<RankFileWriter*> distinct_writers_;
  std::vector<ScaleFactors> written_factors_;
  std::atomic<bool> stop_{false};
};

void ShardStream::measure(std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors,
                          const StatisticsRequest& request, const ChunkSink& sink) {
  StreamPass(*this, tasks, factors, request, sink).run();
}

void ShardStream::scale(std::span<const ShardTask> tasks, std::span<RankFileWriter* const> writers,
                        std::span<const ScaleFactors> factors, const StatisticsRequest& request,
                        const ChunkSink& sink) {
  StreamPass pass(*this, tasks, factors, request, sink);
  pass.write_through(writers);
  pass.run();
}

StreamTimes ShardStream::times() const noexcept {
  constexpr double kNano = 1e-9;
  return {static_cast<double>(read_nanoseconds_) * kNano, static_cast<double>(compute_nanoseconds_) * kNano,
          static_cast<double>(write_nanoseconds_) * kNano};
}

}  // namespace gradclip
