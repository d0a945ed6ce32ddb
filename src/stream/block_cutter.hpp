#pragma once
// Tasks cut into the blocks that workers take, and their results put back in order.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "gradclip/stream/shard_stream.hpp"

namespace gradclip {

/// Hands the chunks of a task that spans several blocks on in order, whichever block is done first. Thread-safe.
class TaskOrder {
 public:
  void deliver(std::uint64_t first, std::uint64_t count, std::vector<MeasuredChunk> chunks, const ChunkSink& sink);

 private:
  std::mutex mutex_;
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, std::pair<std::uint64_t, std::vector<MeasuredChunk>>> waiting_;
};

/// A run of one task's elements, whole chunks but for the task's end.
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

/// Cuts the tasks into blocks, handed out in ascending order. Thread-safe.
class BlockCutter {
 public:
  BlockCutter(std::span<const ShardTask> tasks, std::size_t block_bytes) : tasks_(tasks), block_bytes_(block_bytes) {}

  /// The most bytes that a block's buffer can need, and the most chunks that it can hold.
  [[nodiscard]] static std::size_t most_bytes(std::size_t block_bytes) noexcept;
  [[nodiscard]] static std::size_t most_chunks(std::size_t block_bytes) noexcept;

  /// How many blocks there are, counted up to `most`.
  [[nodiscard]] static std::size_t count(std::span<const ShardTask> tasks, std::size_t block_bytes, std::size_t most);

  /// False where no block is left.
  bool next(StreamBlock& block);

 private:
  /// Whole chunks that still fit; at least one into an empty block.
  [[nodiscard]] std::uint64_t room(const StreamBlock& block, DType dtype) const noexcept;
  void advance();

  std::span<const ShardTask> tasks_;
  std::size_t block_bytes_;
  std::mutex mutex_;
  std::size_t task_ = 0;
  std::uint64_t first_ = 0;
  std::shared_ptr<TaskOrder> order_;
};

}  // namespace gradclip
