#pragma once
// Work that needs shards of several processes, cut into rounds of bounded memory: the same rounds on every process.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gradclip/backend/reduction.hpp"
#include "gradclip/norm/total_norm.hpp"

namespace gradclip {

/// Chunks [first, first + count) of item `item`'s shards.
struct Segment {
  std::size_t item = 0;
  std::uint64_t first_chunk = 0;
  std::uint64_t chunks = 0;
  std::uint64_t first_element = 0;
  std::uint64_t elements = 0;
};

inline constexpr std::uint64_t kMostChunksPerSegment = 16;

/// The segments of an item whose shards have `elements` elements each.
inline void append_segments(std::vector<Segment>& segments, std::size_t item, std::uint64_t elements,
                            std::uint64_t chunks_per_segment = kMostChunksPerSegment) {
  const std::uint64_t chunks = chunk_count(elements);
  for (std::uint64_t first = 0; first < chunks; first += chunks_per_segment) {
    const std::uint64_t count = std::min(chunks_per_segment, chunks - first);
    const std::uint64_t begin = first * kChunkElements;
    segments.push_back({item, first, count, begin, std::min(elements - begin, count * kChunkElements)});
  }
}

/// Parts of `most` elements of its chunks, for shards of which not even one chunk fits: segments of one chunk that
/// begin or end within it. @pre most divides kChunkElements
inline void append_parts(std::vector<Segment>& segments, std::size_t item, std::uint64_t elements, std::uint64_t most) {
  for (std::uint64_t begin = 0; begin < elements; begin += most) {
    segments.push_back({item, begin / kChunkElements, 1, begin, std::min(elements - begin, most)});
  }
}

/// Elements of a segment's chunk number `chunk` (counted in the segment).
inline std::uint64_t chunk_elements(const Segment& segment, std::uint64_t chunk) {
  return std::min<std::uint64_t>(kChunkElements, segment.elements - chunk * kChunkElements);
}

/// Bytes that one round may hold in all processes together: a part of one process's budget, so that even the process
/// that everything comes to stays within it. Never below what one segment needs.
inline std::size_t round_bytes(const Run& run) {
  return std::clamp<std::size_t>(run.stream.options().memory_budget / 8, std::size_t{16} << 20, std::size_t{256} << 20);
}

}  // namespace gradclip
