#include "gradclip/stream/stream_pass.hpp"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>

#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/worker_pool.hpp"

namespace gradclip {
namespace {

using Place = KeptTasks::Place;

/// Adds the time until its end to a counter.
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

Bytes part_of(const Buffer& buffer, std::size_t begin, std::size_t bytes) {
  return buffer.bytes().subspan(begin, bytes);
}

/// Neighbouring pieces of a kind as runs of the slot's bytes: use(begin, bytes) for each, so that many small shards
/// are moved at once.
template <class IsOfKind, class SizeOf, class Use>
void for_each_run(const StreamBlock& block, IsOfKind&& is_of_kind, SizeOf&& size_of_element, Use&& use) {
  std::size_t begin = 0, end = 0;
  const auto finish = [&] {
    if (end > begin) use(begin, end - begin);
    begin = end = 0;
  };
  for (const Piece& piece : block.pieces) {
    if (!is_of_kind(piece)) {
      finish();
      continue;
    }
    if (end == begin) begin = piece.offset;
    end = piece.offset + piece.count * size_of_element(piece);
  }
  finish();
}

}  // namespace

StreamPass::StreamPass(ShardStream& stream, std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors,
                       const StatisticsRequest& request, const ChunkSink& sink)
    : stream_(stream),
      backend_(stream.backend_),
      tasks_(tasks),
      factors_(factors),
      request_(request),
      sink_(sink),
      cutter_(tasks, stream.options_.block_bytes),
      kept_(stream.storage_, tasks) {}

void StreamPass::write_through(std::span<RankFileWriter* const> writers) {
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

void StreamPass::run() {
  const StreamOptions& options = stream_.options_;
  const std::size_t workers = BlockCutter::count(tasks_, options.block_bytes, options.threads);
  if (workers == 0) return;
  try {
    stream_.prepare_workers(workers);
    if (!stream_.on_host()) {
      writers_.empty() ? kept_.keep_what_is_read(backend_) : kept_.take();
    }
    backend_.wait(UnusedMemory::keep);  // the workers use what this thread has allocated
    parallel_for(workers, workers, [&](std::size_t worker, std::size_t) {
      try {
        work(*stream_.workers_[worker]);
      } catch (...) {
        // Whoever waits for this worker's pieces ends with its error.
        if (!stop_.exchange(true)) {
          for (RankFileWriter* writer : distinct_writers_) writer->cancel(std::current_exception());
        }
        throw;
      }
    });
  } catch (...) {
    stream_.storage_.drop_incomplete();
    throw;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What a worker does
// ---------------------------------------------------------------------------------------------------------------------

void StreamPass::work(StreamWorker& worker) {
  try {
    if (stream_.on_host()) {
      work_in_turn(worker);
    } else {
      work_overlapped(worker);
    }
  } catch (...) {
    wait_quietly(backend_);
    throw;
  }
}

void StreamPass::work_in_turn(StreamWorker& worker) {
  StreamSlot& slot = worker.slots[0];
  while (!stop_ && cutter_.next(slot.block)) {
    read(slot);
    submit(slot);
    fingerprint(slot);
    show(slot, worker.number);
    wait();
    hand_on(slot);
  }
}

void StreamPass::work_overlapped(StreamWorker& worker) {
  StreamSlot* busy = nullptr;  // the device works on its block
  for (std::size_t turn = 0;; ++turn) {
    StreamSlot& slot = worker.slots[turn % worker.slots.size()];
    const bool more = !stop_ && cutter_.next(slot.block);
    if (more) read(slot);
    if (busy != nullptr) wait();
    if (more) submit(slot);
    if (busy != nullptr && !stop_) hand_on(*busy);
    if (!more) return;
    fingerprint(slot);
    show(slot, worker.number);
    busy = &slot;
  }
}

void StreamPass::read(StreamSlot& slot) {
  const Stopwatch watch(stream_.read_nanoseconds_);
  slot.reads.clear();
  std::uint64_t bytes = 0;
  for (const Piece& piece : slot.block.pieces) {
    const Place place = kept_.place(piece);
    if (place == Place::kept_on_host || (place == Place::kept && !host_needs(tasks_[piece.task]))) continue;
    slot.reads.push_back({tasks_[piece.task].shard, piece.first, piece.count, slot.staging.data() + piece.offset});
    bytes += piece.count * element_size(piece);
  }
  if (slot.reads.empty()) return;
  tasks_[slot.block.pieces.front().task].file->read(slot.reads);
  stream_.bytes_read_ += bytes;
}

void StreamPass::submit(StreamSlot& slot) {
  const Stopwatch watch(stream_.compute_nanoseconds_);
  if (!stream_.on_host()) upload(slot);
  cut_into_chunks(slot);
  if (writers_.empty()) {
    measure(slot, factors_);
    return;
  }
  backend_.scale({slot.chunks, factors_});
  if (sink_) measure(slot, written_factors_);
  if (!stream_.on_host()) download(slot);
}

/// While the device works: in a pass that measures, staging keeps the stored bytes.
void StreamPass::fingerprint(StreamSlot& slot) {
  const Stopwatch watch(stream_.compute_nanoseconds_);
  slot.fingerprints.clear();
  for (const Piece& piece : slot.block.pieces) {
    const ShardTask& task = tasks_[piece.task];
    if (!task.measured) continue;
    const std::byte* const data = stored(slot, piece);
    const std::size_t size = element_size(piece);
    for (std::uint64_t at = 0; at < piece.count; at += kChunkElements) {
      const std::uint64_t count = std::min<std::uint64_t>(kChunkElements, piece.count - at);
      const bool wanted = task.fingerprint && writers_.empty();
      slot.fingerprints.push_back(wanted ? XXH3_64bits(data + at * size, count * size) : 0);
    }
  }
}

/// Likewise.
void StreamPass::show(const StreamSlot& slot, std::size_t worker) {
  if (stored_sink_ == nullptr || !*stored_sink_) return;
  const Stopwatch watch(stream_.compute_nanoseconds_);
  for (const Piece& piece : slot.block.pieces) {
    if (tasks_[piece.task].shown) (*stored_sink_)(worker, {piece.task, stored(slot, piece), piece.count});
  }
}

void StreamPass::wait() {
  const Stopwatch watch(stream_.compute_nanoseconds_);
  backend_.wait(UnusedMemory::keep);
}

void StreamPass::hand_on(StreamSlot& slot) {
  write(slot);
  if (sink_) deliver(slot);
  for (const Piece& piece : slot.block.pieces) kept_.finish(piece);
  if (stream_.options_.progress) stream_.options_.progress(slot.block.bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// The steps of the phases
// ---------------------------------------------------------------------------------------------------------------------

void StreamPass::upload(StreamSlot& slot) {
  for (const Piece& piece : slot.block.pieces) {
    if (kept_.place(piece) == Place::kept_on_host) {
      const Bytes from = kept_.bytes(piece);
      backend_.move(from, part_of(slot.working, piece.offset, from.size));
    } else if (kept_.place(piece) == Place::becomes_kept) {
      const Bytes to = kept_.bytes(piece);
      backend_.move(part_of(slot.staging, piece.offset, to.size), to);
    }
  }
  for_each_run(
      slot.block, [&](const Piece& piece) { return kept_.place(piece) == Place::file; },
      [&](const Piece& piece) { return element_size(piece); },
      [&](std::size_t begin, std::size_t bytes) {
        backend_.move(part_of(slot.staging, begin, bytes), part_of(slot.working, begin, bytes));
      });
}

void StreamPass::cut_into_chunks(StreamSlot& slot) {
  const Buffer& block = stream_.on_host() ? slot.staging : slot.working;
  slot.chunks.clear();
  slot.measured.clear();
  for (const Piece& piece : slot.block.pieces) {
    const ShardTask& task = tasks_[piece.task];
    std::byte* const data = kept_.works_on_kept(piece) ? kept_.bytes(piece).data : block.data() + piece.offset;
    for (std::uint64_t at = 0; at < piece.count; at += kChunkElements) {
      const auto count = static_cast<std::uint32_t>(std::min<std::uint64_t>(kChunkElements, piece.count - at));
      slot.chunks.push_back({data + at * element_size(piece), count, task.shard->dtype, task.factors});
      if (task.measured) slot.measured.push_back(slot.chunks.back());
    }
  }
}

void StreamPass::measure(StreamSlot& slot, std::span<const ScaleFactors> factors) {
  if (slot.measured.empty()) return;
  const Bytes results = part_of(slot.results, 0, slot.measured.size() * sizeof(ChunkStatistics));
  backend_.statistics({slot.measured, factors}, request_, results);
  if (!stream_.on_host()) backend_.move(results, part_of(slot.results_on_host, 0, results.size));
}

void StreamPass::download(StreamSlot& slot) {
  for_each_run(
      slot.block, [&](const Piece& piece) { return !kept_.works_on_kept(piece); },
      [&](const Piece& piece) { return element_size(piece); },
      [&](std::size_t begin, std::size_t bytes) {
        backend_.move(part_of(slot.working, begin, bytes), part_of(slot.staging, begin, bytes));
      });
  for (const Piece& piece : slot.block.pieces) {
    if (!kept_.works_on_kept(piece)) continue;
    const Bytes from = kept_.bytes(piece);
    backend_.move(from, part_of(slot.staging, piece.offset, from.size));
  }
}

void StreamPass::write(StreamSlot& slot) {
  if (writers_.empty()) return;
  const Stopwatch watch(stream_.write_nanoseconds_);
  for (const Piece& piece : slot.block.pieces) {
    writers_[piece.task]->write(tasks_[piece.task].parameter, piece.first, piece.count,
                                slot.staging.data() + piece.offset);
  }
}

void StreamPass::deliver(StreamSlot& slot) {
  const std::byte* results = (stream_.on_host() ? slot.results : slot.results_on_host).data();
  std::size_t chunk = 0;
  for (const Piece& piece : slot.block.pieces) {
    if (!tasks_[piece.task].measured) continue;
    std::vector<MeasuredChunk> measured;
    for (std::uint64_t at = 0; at < piece.count; at += kChunkElements, ++chunk) {
      ChunkStatistics statistics;
      std::memcpy(&statistics, results + chunk * sizeof statistics, sizeof statistics);
      measured.push_back(
          {piece.task, piece.first + at, slot.measured[chunk].count, statistics, slot.fingerprints[chunk]});
    }
    if (piece.order) {
      piece.order->deliver(piece.first, piece.count, std::move(measured), sink_);
    } else {
      for (const MeasuredChunk& one : measured) sink_(one);
    }
  }
}

bool StreamPass::host_needs(const ShardTask& task) const noexcept {
  return task.fingerprint || (task.shown && stored_sink_ != nullptr && *stored_sink_);
}

const std::byte* StreamPass::stored(const StreamSlot& slot, const Piece& piece) const noexcept {
  return kept_.place(piece) == Place::kept_on_host ? kept_.bytes(piece).data : slot.staging.data() + piece.offset;
}

std::size_t StreamPass::element_size(const Piece& piece) const noexcept {
  return size_of(tasks_[piece.task].shard->dtype);
}

}  // namespace gradclip
