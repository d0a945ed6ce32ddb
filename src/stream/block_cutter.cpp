#include "gradclip/stream/block_cutter.hpp"

#include <algorithm>

#include "gradclip/backend/reduction.hpp"

namespace gradclip {
namespace {

/// Pieces start where vector instructions and devices like them to.
constexpr std::size_t kPieceAlignment = 64;

/// A block is one vectored read.
constexpr std::size_t kMostPieces = 512;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

/// A block takes at least one chunk, however small it is to be.
std::size_t at_least_a_chunk(std::size_t block_bytes) {
  return std::max(block_bytes, kChunkElements * size_of(DType::float64));
}

}  // namespace

void TaskOrder::deliver(std::uint64_t first, std::uint64_t count, std::vector<MeasuredChunk> chunks,
                        const ChunkSink& sink) {
  const std::lock_guard lock(mutex_);
  waiting_.emplace(first, std::pair(count, std::move(chunks)));
  while (!waiting_.empty() && waiting_.begin()->first == next_) {
    auto& [size, ready] = waiting_.begin()->second;
    for (const MeasuredChunk& chunk : ready) sink(chunk);
    next_ += size;
    waiting_.erase(waiting_.begin());
  }
}

std::size_t BlockCutter::most_bytes(std::size_t block_bytes) noexcept {
  return at_least_a_chunk(block_bytes) + kMostPieces * kPieceAlignment;
}

std::size_t BlockCutter::most_chunks(std::size_t block_bytes) noexcept {
  return at_least_a_chunk(block_bytes) / kChunkElements + kMostPieces;
}

std::size_t BlockCutter::count(std::span<const ShardTask> tasks, std::size_t block_bytes, std::size_t most) {
  BlockCutter cutter(tasks, block_bytes);
  StreamBlock block;
  std::size_t blocks = 0;
  while (blocks < most && cutter.next(block)) ++blocks;
  return blocks;
}

bool BlockCutter::next(StreamBlock& block) {
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

std::uint64_t BlockCutter::room(const StreamBlock& block, DType dtype) const noexcept {
  const std::size_t free = block_bytes_ - std::min(block_bytes_, block.bytes);
  const std::uint64_t elements = free / size_of(dtype);
  const std::uint64_t whole = elements / kChunkElements * kChunkElements;
  const std::uint64_t left = tasks_[task_].shard->elements - first_;
  if (left <= elements) return left;
  return block.pieces.empty() ? std::max<std::uint64_t>(whole, kChunkElements) : whole;
}

void BlockCutter::advance() {
  ++task_;
  first_ = 0;
  order_.reset();
}

}  // namespace gradclip
