#include "gradclip/mesh/range_list.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

TEST(RangeList, EqualPiecesAreOneProgression) {
  RangeList list;
  list.append({3, 5}, 10, std::int64_t{1} << 50);
  ASSERT_EQ(list.progressions().size(), 1u);
  EXPECT_EQ(list.size(), std::size_t{1} << 50);
  EXPECT_EQ(list.length(), std::int64_t{1} << 51);
  EXPECT_EQ(list.back(), (IndexRange{10 * ((std::int64_t{1} << 50) - 1) + 3, 10 * ((std::int64_t{1} << 50) - 1) + 5}));
  EXPECT_EQ(list.at(2'000'001).range, (IndexRange{10'000'003, 10'000'005}));
  EXPECT_EQ(list.at(2'000'001).before, 2'000'000);
  EXPECT_EQ(list.count_below(10'000'004), 2'000'001);
  EXPECT_TRUE(list.holds(10'000'004));
  EXPECT_FALSE(list.holds(10'000'005));
}

TEST(RangeList, PiecesThatTouchAreOne) {
  RangeList list{{0, 2}};
  list.append({2, 4});
  EXPECT_THAT(list, ElementsAre(IndexRange{0, 4}));
  list.append({8, 12}, 4, 5);
  EXPECT_THAT(list, ElementsAre(IndexRange{0, 4}, IndexRange{8, 28}));
  list.append({28, 29}, 3, 2);
  EXPECT_THAT(list, ElementsAre(IndexRange{0, 4}, IndexRange{8, 29}, IndexRange{31, 32}));
}

TEST(RangeList, EmptyAndTouchingOnesAreKeptWhereTheyAreGiven) {
  const RangeList list{{0, 2}, {2, 4}, {6, 6}, {6, 8}};
  EXPECT_THAT(list, ElementsAre(IndexRange{0, 2}, IndexRange{2, 4}, IndexRange{6, 6}, IndexRange{6, 8}));
  EXPECT_EQ(list.length(), 6);
  EXPECT_EQ(list.at(4).range, (IndexRange{6, 8}));
  EXPECT_EQ(RangeList({{5, 5}}).length(), 0);
  EXPECT_FALSE(RangeList({{5, 5}}).holds(5));
}

TEST(RangeList, RefusesWhatDoesNotAscend) {
  EXPECT_THROW(RangeList({{2, 4}, {3, 5}}), Error);
  EXPECT_THROW(RangeList({{-1, 4}}), Error);
  EXPECT_THROW(RangeList({{4, 3}}), Error);
}

/// Against a plain vector: progressions of random starts, sizes, strides and lengths, one range at a time or all at
/// once.
TEST(RangeList, IsAPlainListOfRanges) {
  std::mt19937_64 random(3);
  const auto upto = [&](std::int64_t most) { return std::uniform_int_distribution<std::int64_t>(0, most)(random); };
  for (int repetition = 0; repetition < 2000; ++repetition) {
    RangeList list;
    std::vector<IndexRange> plain;
    std::vector<std::int64_t> indices;
    std::int64_t at = upto(3);
    for (std::int64_t parts = upto(5); parts > 0; --parts) {
      const std::int64_t size = upto(3), stride = size + upto(2), count = upto(4);
      if (upto(1) == 0) {
        list.append({at, at + size}, stride, count);
      } else {
        for (std::int64_t i = 0; i < count; ++i) list.append({at + i * stride, at + i * stride + size});
      }
      for (std::int64_t i = 0; i < count && size > 0; ++i) {
        const IndexRange range{at + i * stride, at + i * stride + size};
        if (!plain.empty() && plain.back().end == range.begin) {
          plain.back().end = range.end;
        } else {
          plain.push_back(range);
        }
        for (std::int64_t index = range.begin; index < range.end; ++index) indices.push_back(index);
      }
      at += stride * count + upto(2);
    }
    ASSERT_THAT(list, ElementsAreArray(plain));
    ASSERT_EQ(list, RangeList(plain)) << "equal lists, however they were made";
    ASSERT_EQ(list.size(), plain.size());
    ASSERT_EQ(list.length(), static_cast<std::int64_t>(indices.size()));
    ASSERT_EQ(list.empty(), plain.empty());
    for (std::size_t i = 0; i < plain.size(); ++i) ASSERT_EQ(list[i], plain[i]);
    for (std::int64_t position = 0; position < list.length(); ++position) {
      const auto [range, before] = list.at(position);
      ASSERT_EQ(range.begin + (position - before), indices[static_cast<std::size_t>(position)]);
      ASSERT_TRUE(std::find(plain.begin(), plain.end(), range) != plain.end());
    }
    for (std::int64_t index = 0; index <= at + 1; ++index) {
      const auto below = std::lower_bound(indices.begin(), indices.end(), index);
      ASSERT_EQ(list.count_below(index), below - indices.begin());
      ASSERT_EQ(list.holds(index), below != indices.end() && *below == index);
    }
  }
}

}  // namespace
}  // namespace gradclip
