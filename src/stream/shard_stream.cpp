#include "gradclip/stream/shard_stream.hpp"

#include <algorithm>

#include "gradclip/stream/block_cutter.hpp"
#include "gradclip/stream/stream_pass.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kHostBlock = std::size_t{1} << 20;
constexpr std::size_t kDeviceBlock = std::size_t{4} << 20;
constexpr std::size_t kSlots = std::tuple_size_v<decltype(StreamWorker::slots)>;

std::size_t result_bytes(std::size_t block_bytes) {
  return BlockCutter::most_chunks(block_bytes) * sizeof(ChunkStatistics);
}

/// Bytes of one worker's slots, on the device and in pinned memory alike.
std::size_t worker_bytes(std::size_t block_bytes) {
  return kSlots * (BlockCutter::most_bytes(block_bytes) + result_bytes(block_bytes));
}

StreamOptions settled(StreamOptions options, bool on_host) {
  options.threads = std::max<std::size_t>(1, options.threads);
  if (options.block_bytes == 0) options.block_bytes = on_host ? kHostBlock : kDeviceBlock;
  if (!on_host) {
    // Pinned memory is not to be had without end: a quarter of the budget at most.
    const std::size_t bytes = worker_bytes(options.block_bytes);
    const std::size_t room = std::min(options.device_memory_budget, options.memory_budget / 4) / bytes;
    options.threads = std::clamp<std::size_t>(room, 1, options.threads);
  }
  return options;
}

std::size_t left_over(std::size_t budget, std::size_t taken) {
  return budget - std::min(budget, taken);
}

}  // namespace

ShardStream::ShardStream(Backend& backend, const StreamOptions& options)
    : backend_(backend),
      space_(backend.describe().working_space),
      options_(settled(options, on_host())),
      storage_(left_over(options_.device_memory_budget, slot_bytes()), options_.memory_budget / 2) {
  if (on_host()) storage_.keep_no_more();
}

ShardStream::~ShardStream() = default;

void ShardStream::measure(std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors,
                          const StatisticsRequest& request, const ChunkSink& sink, const StoredSink& stored) {
  StreamPass pass(*this, tasks, factors, request, sink);
  pass.show_stored(stored);
  pass.run();
}

void ShardStream::scale(std::span<const ShardTask> tasks, std::span<RankFileWriter* const> writers,
                        std::span<const ScaleFactors> factors, const StatisticsRequest& request,
                        const ChunkSink& sink) {
  StreamPass pass(*this, tasks, factors, request, sink);
  pass.write_through(writers);
  pass.run();
}

void ShardStream::prepare_workers(std::size_t count) {
  const std::size_t block = BlockCutter::most_bytes(options_.block_bytes);
  const std::size_t results = result_bytes(options_.block_bytes);
  while (workers_.size() < count) {
    auto worker = std::make_unique<StreamWorker>();
    worker->number = workers_.size();
    if (on_host()) {
      worker->slots[0].staging = backend_.allocate(block, space_);
      worker->slots[0].results = backend_.allocate(results, space_);
    } else {
      for (StreamSlot& slot : worker->slots) {
        slot.staging = backend_.allocate(block, MemorySpace::pinned);
        slot.working = backend_.allocate(block, space_);
        slot.results = backend_.allocate(results, space_);
        slot.results_on_host = backend_.allocate(results, MemorySpace::pinned);
      }
    }
    workers_.push_back(std::move(worker));
  }
}

std::size_t ShardStream::slot_bytes() const noexcept {
  return on_host() ? 0 : options_.threads * worker_bytes(options_.block_bytes);
}

StreamTimes ShardStream::times() const noexcept {
  constexpr double kNano = 1e-9;
  return {static_cast<double>(read_nanoseconds_) * kNano, static_cast<double>(compute_nanoseconds_) * kNano,
          static_cast<double>(write_nanoseconds_) * kNano};
}

}  // namespace gradclip
