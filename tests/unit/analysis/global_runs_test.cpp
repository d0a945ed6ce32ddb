#include "gradclip/analysis/global_runs.hpp"

#include <gtest/gtest.h>

#include <random>

namespace gradclip {
namespace {

std::uint64_t row_major(std::span<const std::int64_t> shape, const std::vector<std::int64_t>& index) {
  std::uint64_t position = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    position = position * static_cast<std::uint64_t>(shape[d]) + static_cast<std::uint64_t>(index[d]);
  }
  return position;
}

/// Any cut of any layout, against the layout's own global_index.
void expect_runs(const ShardLayout& layout, const std::vector<std::int64_t>& shape) {
  std::uint64_t elements = 1;
  for (const std::int64_t extent : shape) elements *= static_cast<std::uint64_t>(extent);
  std::vector<std::uint64_t> positions;
  for (std::uint64_t i = 0; i < layout.elements(); ++i) positions.push_back(row_major(shape, layout.global_index(i)));
  const GlobalExtent extent = global_extent(layout, shape);
  if (positions.empty()) {
    EXPECT_EQ(extent.begin, extent.end);
  } else {
    EXPECT_LE(extent.begin, positions.front());
    EXPECT_GE(extent.end, positions.back() + 1);
    const bool of_a_part = layout.flat() && static_cast<std::uint64_t>(layout.flat()->size()) != elements;
    if (!of_a_part) {
      EXPECT_EQ(extent.end - extent.begin, positions.back() + 1 - positions.front());
    }
  }
  for (std::uint64_t begin = 0; begin <= elements; ++begin) {
    const auto before =
        static_cast<std::uint64_t>(std::lower_bound(positions.begin(), positions.end(), begin) - positions.begin());
    ASSERT_EQ(elements_before(layout, shape, begin), before) << begin;
    const std::uint64_t end = std::min(elements, begin + 17);
    const std::uint64_t last = elements_before(layout, shape, end);
    std::uint64_t local = before;
    for (const StridedRun& run : global_runs(layout, shape, before, last, begin)) {
      for (std::uint32_t r = 0; r < run.repeats; ++r) {
        for (std::uint32_t i = 0; i < run.count; ++i) {
          ASSERT_LT(local, last);
          ASSERT_EQ(begin + run.offset + r * run.stride + i, positions[local++]);
        }
      }
    }
    ASSERT_EQ(local, last);
  }
}

TEST(GlobalRuns, Whole) {
  expect_runs(whole_layout(std::vector<std::int64_t>{}), {});
  expect_runs(whole_layout(std::vector<std::int64_t>{3, 4}), {3, 4});
  expect_runs(whole_layout(std::vector<std::int64_t>{3, 0}), {3, 0});
}

TEST(GlobalRuns, ColumnsAreOneStridedRun) {
  const ShardLayout layout({{{0, 4}}, {{2, 5}}}, std::nullopt);
  const std::vector<std::int64_t> shape{4, 10};
  const std::vector<StridedRun> runs = global_runs(layout, shape, 0, layout.elements(), 0);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0], (StridedRun{2, 3, 10, 4}));
  expect_runs(layout, shape);
}

TEST(GlobalRuns, RandomLayouts) {
  std::mt19937 random(7);
  const auto below = [&](int limit) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(limit)); };
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int64_t> shape;
    std::vector<RangeList> ranges;
    std::int64_t held = 1;
    const std::int64_t dimensions = below(4);
    for (std::int64_t d = 0; d < dimensions; ++d) {
      shape.push_back(1 + below(7));
      RangeList of_dimension;
      std::int64_t total = 0;
      for (std::int64_t at = below(2); at < shape.back(); at += 1 + below(3)) {
        const std::int64_t end = std::min(shape.back(), at + 1 + below(3));
        of_dimension.push_back({at, end});
        total += end - at;
        at = end;
      }
      held *= total;
      ranges.push_back(of_dimension);
    }
    std::optional<IndexRange> flat;
    if (below(3) == 0) {
      const std::int64_t begin = below(static_cast<int>(held) + 1);
      flat = IndexRange{begin, begin + below(static_cast<int>(held - begin) + 1)};
    }
    expect_runs(ShardLayout(ranges, flat), shape);
  }
}

}  // namespace
}  // namespace gradclip
