#include "gradclip/dump/boxes.hpp"

#include <algorithm>
#include <cstring>

namespace gradclip {
namespace {

/// Advances a row-major counter within [low, high) by `step`, dimensions [0, last] only. @return false past the end.
bool advance(std::vector<std::uint64_t>& at, const std::vector<std::uint64_t>& low,
             const std::vector<std::uint64_t>& high, const std::vector<std::uint64_t>& step, std::size_t dimensions) {
  for (std::size_t d = dimensions; d-- > 0;) {
    at[d] += step[d];
    if (at[d] < high[d]) return true;
    at[d] = low[d];
  }
  return false;
}

}  // namespace

std::uint64_t Box::elements() const noexcept {
  std::uint64_t product = 1;
  for (const std::uint64_t extent : count) product *= extent;
  return product;
}

std::vector<Box> boxes_of_range(std::span<const std::int64_t> shape, std::uint64_t first, std::uint64_t count) {
  std::vector<Box> boxes;
  const std::size_t dimensions = shape.size();
  if (count == 0) return boxes;
  if (dimensions == 0) return {Box{}};
  std::vector<std::uint64_t> volume(dimensions, 1);  // of one index of dimension d
  for (std::size_t d = dimensions - 1; d > 0; --d) volume[d - 1] = volume[d] * static_cast<std::uint64_t>(shape[d]);
  while (count != 0) {
    // The outermost dimension that the range can advance in by whole steps from here.
    std::size_t d = dimensions - 1;
    while (d > 0 && first % volume[d - 1] == 0 && count >= volume[d - 1]) --d;
    Box box;
    for (std::size_t k = 0; k < dimensions; ++k) {
      box.start.push_back(first / volume[k] % static_cast<std::uint64_t>(shape[k]));
      box.count.push_back(k < d ? 1 : static_cast<std::uint64_t>(shape[k]));
    }
    box.count[d] = std::min(count / volume[d], static_cast<std::uint64_t>(shape[d]) - box.start[d]);
    const std::uint64_t done = box.count[d] * volume[d];
    first += done;
    count -= done;
    boxes.push_back(std::move(box));
  }
  return boxes;
}

void for_each_chunk(const Box& box, std::span<const std::uint64_t> chunk,
                    const std::function<void(std::span<const std::uint64_t>)>& visit) {
  const std::size_t dimensions = chunk.size();
  std::vector<std::uint64_t> low(dimensions);
  std::vector<std::uint64_t> high(dimensions);
  for (std::size_t d = 0; d < dimensions; ++d) {
    low[d] = box.start[d] / chunk[d] * chunk[d];
    high[d] = box.start[d] + box.count[d];
  }
  std::vector<std::uint64_t> at = low;
  const std::vector<std::uint64_t> step(chunk.begin(), chunk.end());
  do {
    visit(at);
  } while (advance(at, low, high, step, dimensions));
}

void copy_from_chunk(std::span<const std::uint64_t> chunk_start, std::span<const std::uint64_t> chunk_shape,
                     const std::byte* chunk, const Box& box, std::byte* to, std::size_t element_size) {
  const std::size_t dimensions = chunk_shape.size();
  std::vector<std::uint64_t> low(dimensions);
  std::vector<std::uint64_t> high(dimensions);
  for (std::size_t d = 0; d < dimensions; ++d) {
    low[d] = std::max(chunk_start[d], box.start[d]);
    high[d] = std::min(chunk_start[d] + chunk_shape[d], box.start[d] + box.count[d]);
    if (low[d] >= high[d]) return;
  }
  const std::size_t row = (high[dimensions - 1] - low[dimensions - 1]) * element_size;
  const std::vector<std::uint64_t> one(dimensions, 1);
  std::vector<std::uint64_t> at = low;
  do {
    std::uint64_t source = 0;
    std::uint64_t target = 0;
    for (std::size_t d = 0; d < dimensions; ++d) {
      source = source * chunk_shape[d] + (at[d] - chunk_start[d]);
      target = target * box.count[d] + (at[d] - box.start[d]);
    }
    std::memcpy(to + target * element_size, chunk + source * element_size, row);
  } while (advance(at, low, high, one, dimensions - 1));
}

}  // namespace gradclip
