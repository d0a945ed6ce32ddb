#include "gradclip/mesh/coverage.hpp"

#include <gtest/gtest.h>

#include <random>

namespace gradclip {
namespace {

using Shape = std::vector<std::int64_t>;
using Ranges = std::vector<RangeList>;

Coverage whole(const Shape& shape) {
  return Coverage(whole_layout(shape));
}

Coverage block(Ranges ranges, std::optional<IndexRange> flat = std::nullopt) {
  return Coverage(ShardLayout(std::move(ranges), flat));
}

Coverage all(std::initializer_list<Coverage> parts) {
  Coverage sum;
  for (const Coverage part : parts) sum += part;
  return sum;
}

TEST(Coverage, OfBlocksThatTileTheTensor) {
  const Coverage left = block({{{0, 4}}, {{0, 2}}});
  const Coverage right = block({{{0, 4}}, {{2, 7}}});
  EXPECT_EQ(all({left, right}), whole({4, 7}));
  EXPECT_EQ(all({block({{{0, 1}, {3, 4}}, {{0, 7}}}), block({{{1, 3}}, {{0, 7}}})}), whole({4, 7})) << "several ranges";
  EXPECT_NE(whole({4, 7}), whole({7, 4}));
}

TEST(Coverage, OfAsManyElementsElsewhere) {
  const Coverage first = block({{{0, 2}}, {{0, 7}}});
  EXPECT_NE(all({first, first}), whole({4, 7})) << "twice, and the other half not at all";
  EXPECT_NE(all({first, block({{{1, 3}}, {{0, 7}}})}), whole({4, 7})) << "they overlap";
  EXPECT_NE(all({block({{{0, 4}}, {{0, 3}}}), block({{{0, 4}}, {{4, 7}}})}), whole({4, 7})) << "a gap";
}

TEST(Coverage, OfNothing) {
  EXPECT_EQ(Coverage(), whole({0, 7}));
  EXPECT_EQ(Coverage(), block({{{3, 3}}, {{0, 7}}}));
  EXPECT_EQ(Coverage(), block({{}, {{0, 7}}}));
  EXPECT_NE(Coverage(), whole({}));
  EXPECT_EQ(whole({}), block({}, IndexRange{0, 1}));
}

TEST(Coverage, Times) {
  const Coverage one = whole({3, 5});
  EXPECT_EQ(one.times(3), all({one, one, one}));
  EXPECT_EQ(one.times(0), Coverage());
  Coverage difference = one.times(2);
  difference -= one;
  EXPECT_EQ(difference, one);
}

/// Against the sum over single elements: random cuts of a flattening, of tensors and of lists of ranges.
TEST(Coverage, OfRangesOfAFlattening) {
  std::mt19937_64 random(7);
  const auto upto = [&](std::int64_t most) { return std::uniform_int_distribution<std::int64_t>(0, most)(random); };
  for (int repetition = 0; repetition < 300; ++repetition) {
    Ranges ranges;
    for (std::int64_t dimensions = upto(4); dimensions > 0; --dimensions) {
      RangeList& list = ranges.emplace_back();
      std::int64_t at = 0;
      for (std::int64_t i = upto(2); i >= 0; --i) {
        const std::int64_t begin = at + upto(3);
        at = begin + 1 + upto(2);
        list.push_back({begin, at});
      }
    }
    const ShardLayout parent(ranges, std::nullopt);
    const auto elements = static_cast<std::int64_t>(parent.elements());
    const std::int64_t begin = upto(elements);
    const std::int64_t end = begin + upto(elements - begin);
    Coverage expected;
    for (std::int64_t e = begin; e < end; ++e) {
      Ranges one;
      for (const std::int64_t index : parent.global_index(static_cast<std::uint64_t>(e)))
        one.push_back({{index, index + 1}});
      expected += block(one);
    }
    EXPECT_EQ(block(ranges, IndexRange{begin, end}), expected) << repetition;
  }
}

TEST(Coverage, OfHugeTensors) {
  constexpr std::int64_t kExtent = std::int64_t{1} << 31;
  const Coverage upper = block({{{0, 17}}, {{0, kExtent}}});
  const Coverage lower = block({{{17, kExtent}}, {{0, kExtent}}});
  EXPECT_EQ(all({upper, lower}), whole({kExtent, kExtent}));
  EXPECT_EQ(all({block({{{0, kExtent}}, {{0, kExtent}}}, IndexRange{0, 12345678901}),
                 block({{{0, kExtent}}, {{0, kExtent}}}, IndexRange{12345678901, kExtent * kExtent})}),
            whole({kExtent, kExtent}));
}

}  // namespace
}  // namespace gradclip
