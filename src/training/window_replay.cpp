#include "gradclip/training/window_replay.hpp"

#include <algorithm>

#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

constexpr std::uint64_t kMostHeld = std::uint64_t{1} << 22;  // elements of all addends, so that caches serve them
constexpr std::uint64_t kOtherBytes = 6 * sizeof(double);    // of an element, beside its addends
constexpr std::uint64_t kLeastBlock = 256;

}  // namespace

WindowReplay::WindowReplay(Backend& backend, std::uint64_t memory)
    : backend_(backend), space_(backend.describe().working_space), memory_(memory) {}

std::uint32_t WindowReplay::block_elements(const ReductionPlan& plan, std::size_t addends) const noexcept {
  const std::uint64_t by_memory = memory_ / (addends * size_of(plan.reduce) + kOtherBytes);
  const std::uint64_t most = std::min<std::uint64_t>(kMostHeld / addends, kChunkElements);
  return static_cast<std::uint32_t>(std::max(kLeastBlock, std::min(by_memory, most)));
}

std::span<const std::byte> WindowReplay::replay(const ReductionPlan& plan, const std::vector<bool>& ends,
                                                std::size_t addends, std::uint32_t count, const ReadGradient& read) {
  prepare(plan.reduce, addends);
  const DType storage = plan.output.dtype;
  const Chunk stored{room(stored_, count, space_), count, storage, 0};
  const Chunk rounded{room(rounded_, count, space_), count, storage, 0};
  bool any = false;
  for (std::size_t k = 0; k < ends.size(); ++k) {
    for (std::size_t i = 0; i < addends; ++i) backward(ends, i, k, count, read);
    if (!ends[k]) continue;
    const std::optional<Chunk> gradient = reduced(plan, count);
    if (!gradient) continue;
    accumulate(any ? rounded : stored, *gradient, AccumulateStep::assign);
    if (any) accumulate(stored, rounded, AccumulateStep::add);
    any = true;
  }
  GRADCLIP_CHECK(any, "a step whose gradients are all None");
  const std::size_t bytes = count * size_of(storage);
  if (space_ == MemorySpace::host) return {stored.data, bytes};
  std::byte* out = room(written_, count, MemorySpace::pinned);
  backend_.move({stored.data, bytes, space_}, {out, bytes, MemorySpace::pinned});
  backend_.wait(UnusedMemory::keep);
  return {out, bytes};
}

/// Their memory serves one block after another.
void WindowReplay::prepare(DType reduce, std::size_t addends) {
  if (reduce != reduce_ || accumulators_.size() > addends) accumulators_.clear();
  reduce_ = reduce;
  while (accumulators_.size() < addends) accumulators_.emplace_back(backend_, reduce);
}

void WindowReplay::backward(const std::vector<bool>& ends, std::size_t addend, std::size_t microbatch,
                            std::uint32_t count, const ReadGradient& read) {
  GradientAccumulator& rank = accumulators_[addend];
  if (microbatch == 0) rank.prepare_for_grad_accumulation();
  if (microbatch + 1 == ends.size()) rank.prepare_for_final_backward();
  rank.set_requires_gradient_sync(ends[microbatch]);
  const bool on_host = space_ == MemorySpace::host;
  std::byte* to = room(read_, count, on_host ? MemorySpace::host : MemorySpace::pinned);
  if (const std::optional<MicrobatchGradient> gradient = read(addend, microbatch, to)) {
    Chunk chunk{to, count, gradient->dtype, 0};
    if (!on_host) {
      const std::size_t bytes = count * size_of(gradient->dtype);
      chunk.data = room(incoming_, count, space_);
      backend_.move({to, bytes, MemorySpace::pinned}, {chunk.data, bytes, space_});
    }
    rank.backward(chunk, gradient->scale_inv);
  } else {
    rank.backward_without_gradient();
  }
  if (microbatch == 0) rank.prepare_after_first_microbatch();
}

/// The window's gradients reduced: in the place of an addend, in the reduce type. Empty: all were None.
std::optional<Chunk> WindowReplay::reduced(const ReductionPlan& plan, std::uint32_t count) {
  std::vector<std::optional<Chunk>> left;
  for (const GradientAccumulator& rank : accumulators_) {
    left.push_back(rank.none() ? std::nullopt : std::optional(rank.accumulated()));
  }
  static_cast<void>(room(exact_, count, space_));
  for (std::size_t i = 0; i < plan.reductions.size(); ++i) {
    const GroupReduction& group = plan.reductions[i];
    for (const std::optional<Chunk>& one : left) {
      if (one && i == plan.sums) divide(*one, plan.before);
    }
    if (group.ranks == 1) continue;
    std::vector<std::optional<Chunk>> next;
    for (std::size_t first = 0; first < left.size(); first += group.ranks) {
      next.push_back(combined(std::span(left).subspan(first, group.ranks), group.divisor));
    }
    left = std::move(next);
  }
  GRADCLIP_CHECK(left.size() == 1, "a reduction without a result");
  if (left[0]) divide(*left[0], plan.after);
  return left[0];
}

/// In the place of the first addend that there is, which nobody needs any more.
std::optional<Chunk> WindowReplay::combined(std::span<const std::optional<Chunk>> group, double divisor) {
  const ScaleFactors unscaled;
  std::vector<Chunk> chunks;
  for (const std::optional<Chunk>& addend : group) {
    if (addend) chunks.push_back(*addend);
  }
  if (chunks.empty()) return std::nullopt;
  std::vector<ChunkTable> tables;
  for (const Chunk& chunk : chunks) tables.push_back({{&chunk, 1}, {&unscaled, 1}});
  const Chunk& into = chunks[0];
  backend_.combine(tables, PartialOperation::avg, divisor, {exact_.data(), into.count * sizeof(double), space_});
  accumulate(into, {exact_.data(), into.count, DType::float64, 0}, AccumulateStep::assign);
  return into;
}

void WindowReplay::divide(const Chunk& chunk, double divisor) {
  if (divisor == 1.0) return;
  ScaleFactors factors;
  factors.steps[0] = ScaleStep::divide;
  factors.numbers[0] = divisor;
  backend_.scale({{&chunk, 1}, {&factors, 1}});
  backend_.wait(UnusedMemory::keep);
}

void WindowReplay::accumulate(const Chunk& into, const Chunk& from, AccumulateStep step) {
  const ScaleFactors unscaled;
  backend_.accumulate({&into, 1}, {{&from, 1}, {&unscaled, 1}}, step);
  backend_.wait(UnusedMemory::keep);
}

std::byte* WindowReplay::room(Buffer& buffer, std::uint32_t count, MemorySpace space) {
  const std::size_t bytes = count * sizeof(double);
  if (buffer.size() < bytes) buffer = backend_.allocate(bytes, space);
  return buffer.data();
}

}  // namespace gradclip
