#pragma once
// The training loop over the elements of one shard: accumulated on each rank, reduced at the end of each window,
// stored.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/training/gradient_accumulator.hpp"
#include "gradclip/training/reduction_plan.hpp"

namespace gradclip {

/// A rank's gradient of one microbatch as it was read.
struct MicrobatchGradient {
  DType dtype = DType::float32;
  float scale_inv = 1.0F;  ///< of float8
};

/// Reads the gradient of an addend in a microbatch into `to` (host memory, for at least 8 bytes an element). Empty: it
/// is None.
using ReadGradient =
    std::function<std::optional<MicrobatchGradient>(std::size_t addend, std::size_t microbatch, std::byte* to)>;

/// What one thread works with, in the backend's working space.
class WindowReplay {
 public:
  /// @param memory  bytes of the working space that it may use at most
  WindowReplay(Backend& backend, std::uint64_t memory);

  /// How many elements a block may have: at most kChunkElements, and at least 256 whatever the memory.
  [[nodiscard]] std::uint32_t block_elements(const ReductionPlan& plan, std::size_t addends) const noexcept;

  /// @param ends   the microbatches that end windows; the last one does
  /// @param count  elements of the block
  /// @return the elements as stored, in host memory, until the next call
  /// @pre a gradient of some addend and microbatch is not None
  [[nodiscard]] std::span<const std::byte> replay(const ReductionPlan& plan, const std::vector<bool>& ends,
                                                  std::size_t addends, std::uint32_t count, const ReadGradient& read);

 private:
  void prepare(DType reduce, std::size_t addends);
  void backward(const std::vector<bool>& ends, std::size_t addend, std::size_t microbatch, std::uint32_t count,
                const ReadGradient& read);
  [[nodiscard]] std::optional<Chunk> reduced(const ReductionPlan& plan, std::uint32_t count);
  [[nodiscard]] std::optional<Chunk> combined(std::span<const std::optional<Chunk>> group, double divisor);
  void divide(const Chunk& chunk, double divisor);
  void accumulate(const Chunk& into, const Chunk& from, AccumulateStep step);
  std::byte* room(Buffer& buffer, std::uint32_t count, MemorySpace space);

  Backend& backend_;
  MemorySpace space_;
  std::uint64_t memory_;
  DType reduce_ = DType::float32;
  std::vector<GradientAccumulator> accumulators_;  ///< one for each addend
  Buffer read_, incoming_, exact_, rounded_, stored_, written_;
};

}  // namespace gradclip
