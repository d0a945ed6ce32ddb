#pragma once
// Where the elements of a local shard lie in the row-major order of the global tensor.

#include <cstdint>
#include <span>
#include <vector>

#include "gradclip/mesh/shard_layout.hpp"

namespace gradclip {

/// Global positions offset + i * stride + [0, count) for i in [0, repeats), offset counted from where a block begins.
/// Trivially copyable.
struct StridedRun {
  std::uint32_t offset = 0;
  std::uint32_t count = 0;
  std::uint32_t stride = 0;
  std::uint32_t repeats = 1;

  [[nodiscard]] std::uint64_t elements() const noexcept { return std::uint64_t{count} * repeats; }
  friend bool operator==(const StridedRun&, const StridedRun&) = default;
};

/// How many elements of the local shard lie before global position `position`. A shard keeps the global order, so what
/// it holds of the global range [x, y) is the local range [elements_before(x), elements_before(y)).
/// @param shape  global  @pre position <= product of shape
[[nodiscard]] std::uint64_t elements_before(const ShardLayout& layout, std::span<const std::int64_t> shape,
                                            std::uint64_t position);

/// Global positions [begin, end).
struct GlobalExtent {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// Global positions outside of which the shard holds nothing: from its first element to its last, except that a range
/// of the flattening of a part of the tensor counts as that part. Empty for an empty shard.
[[nodiscard]] GlobalExtent global_extent(const ShardLayout& layout, std::span<const std::int64_t> shape);

/// Where the local elements [first, last) lie, in ascending order, counted from global position `begin`.
/// @pre they lie at global positions [begin, begin + 2^32); last <= layout.elements()
[[nodiscard]] std::vector<StridedRun> global_runs(const ShardLayout& layout, std::span<const std::int64_t> shape,
                                                  std::uint64_t first, std::uint64_t last, std::uint64_t begin);

}  // namespace gradclip
