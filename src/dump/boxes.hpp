#pragma once
// A range of the row-major flattening of an array as a sequence of boxes.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace gradclip {

struct Box {
  std::vector<std::uint64_t> start;
  std::vector<std::uint64_t> count;

  [[nodiscard]] std::uint64_t elements() const noexcept;
};

/// The boxes that, one after another in row-major order each, are elements [first, first + count): at most two for
/// every dimension. None for count = 0; one without dimensions for a 0-dim array.
/// @pre first + count <= product of shape
[[nodiscard]] std::vector<Box> boxes_of_range(std::span<const std::int64_t> shape, std::uint64_t first,
                                              std::uint64_t count);

/// Calls `visit(chunk)` for the start of each chunk of a grid that the box touches, in row-major order.
void for_each_chunk(const Box& box, std::span<const std::uint64_t> chunk,
                    const std::function<void(std::span<const std::uint64_t> start)>& visit);

/// Copies the common part of a chunk's content (row-major, whole chunk) to a box's content (row-major).
void copy_from_chunk(std::span<const std::uint64_t> chunk_start, std::span<const std::uint64_t> chunk_shape,
                     const std::byte* chunk, const Box& box, std::byte* to, std::size_t element_size);

}  // namespace gradclip
