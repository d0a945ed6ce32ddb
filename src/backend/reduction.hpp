#pragma once
// The order of every sum over the elements of a tensor, shared by all backends (docs/arithmetic.md).
//
// A tensor, flattened in row-major order, is cut into chunks; a chunk into sub-blocks; inside a sub-block element i
// belongs to lane i mod kLanes. A lane adds its elements in order in float64; the lanes are folded by halves (lane j +=
// lane j + 32, then 16, 8, 4, 2, 1), the sub-blocks of the chunk likewise (sub-block j += sub-block j + 8, then 4, 2,
// 1). Missing elements add nothing. 64 lanes are 8 vector registers of 8 doubles on a CPU; 16 sub-blocks of 64 lanes
// are the 1,024 lanes of a chunk on a GPU.

#include <cstddef>
#include <cstdint>

namespace gradclip {

inline constexpr std::size_t kLanes = 64;
inline constexpr std::size_t kSubBlockElements = 4096;
inline constexpr std::size_t kSubBlocks = 16;
inline constexpr std::size_t kChunkElements = kSubBlockElements * kSubBlocks;  // 65,536

static_assert(kSubBlockElements % kLanes == 0);
static_assert((kLanes & (kLanes - 1)) == 0 && (kSubBlocks & (kSubBlocks - 1)) == 0, "folded by halves");

/// Chunks of a tensor of `elements` elements.
[[nodiscard]] constexpr std::uint64_t chunk_count(std::uint64_t elements) noexcept {
  return elements / kChunkElements + (elements % kChunkElements != 0 ? 1 : 0);
}

}  // namespace gradclip
