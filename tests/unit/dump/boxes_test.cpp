#include "gradclip/dump/boxes.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

namespace gradclip {
namespace {

/// Flat positions of a box's elements in order.
std::vector<std::uint64_t> positions(const Box& box, const std::vector<std::int64_t>& shape) {
  std::vector<std::uint64_t> result;
  for (std::uint64_t i = 0; i < box.elements(); ++i) {
    std::uint64_t rest = i;
    std::vector<std::uint64_t> at(shape.size());
    for (std::size_t d = shape.size(); d-- > 0;) {
      at[d] = box.start[d] + rest % box.count[d];
      rest /= box.count[d];
    }
    std::uint64_t position = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) position = position * static_cast<std::uint64_t>(shape[d]) + at[d];
    result.push_back(position);
  }
  return result;
}

TEST(Boxes, OneAfterAnotherAreExactlyTheRange) {
  const std::vector<std::vector<std::int64_t>> shapes{{7}, {3, 4}, {2, 3, 4}, {1, 5, 1}, {2, 1, 3, 2}};
  for (const auto& shape : shapes) {
    std::uint64_t total = 1;
    for (const auto extent : shape) total *= static_cast<std::uint64_t>(extent);
    for (std::uint64_t first = 0; first <= total; ++first) {
      for (std::uint64_t count = 0; first + count <= total; ++count) {
        std::vector<std::uint64_t> found;
        const auto boxes = boxes_of_range(shape, first, count);
        EXPECT_LE(boxes.size(), 2 * shape.size());
        for (const Box& box : boxes) {
          for (const auto position : positions(box, shape)) found.push_back(position);
        }
        std::vector<std::uint64_t> expected(count);
        std::iota(expected.begin(), expected.end(), first);
        ASSERT_EQ(found, expected) << "first " << first << " count " << count;
      }
    }
  }
}

TEST(Boxes, AScalarIsOneBoxWithoutDimensions) {
  EXPECT_EQ(boxes_of_range({}, 0, 1).size(), 1u);
  EXPECT_EQ(boxes_of_range({}, 0, 1)[0].elements(), 1u);
  EXPECT_TRUE(boxes_of_range({}, 0, 0).empty());
}

TEST(Boxes, ChunksGiveEachElementOfABoxOnce) {
  const std::vector<std::int64_t> shape{5, 7};
  const std::vector<std::uint64_t> chunk{2, 3};
  const Box box{{1, 2}, {4, 5}};
  std::vector<std::byte> result(box.elements(), std::byte{255});
  int chunks = 0;
  for_each_chunk(box, chunk, [&](std::span<const std::uint64_t> start) {
    ++chunks;
    std::vector<std::byte> content(6);
    for (std::uint64_t i = 0; i < 2; ++i) {
      for (std::uint64_t j = 0; j < 3; ++j) {
        content[i * 3 + j] = static_cast<std::byte>((start[0] + i) * 7 + start[1] + j);
      }
    }
    copy_from_chunk(start, chunk, content.data(), box, result.data(), 1);
  });
  EXPECT_EQ(chunks, 9);
  const auto expected = positions(box, shape);
  for (std::size_t i = 0; i < result.size(); ++i) EXPECT_EQ(std::to_integer<std::uint64_t>(result[i]), expected[i]);
}

}  // namespace
}  // namespace gradclip
