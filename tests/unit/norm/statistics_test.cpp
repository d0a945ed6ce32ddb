#include "gradclip/norm/statistics.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace gradclip {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(ScaledSum, AddsWithoutRescalingWhereExponentsAgree) {
  const ScaledSum sum = add({1.5, 7}, {2.25, 7}, 2.0);
  EXPECT_EQ(sum.sum, 3.75);
  EXPECT_EQ(sum.exponent, 7);
}

TEST(ScaledSum, RescalesTheSmallerExponentExactly) {
  // 3 × 2^(2·10) + 5 × 2^(2·8) = (3 + 5/16) × 2^20, whichever comes first.
  for (const ScaledSum& sum : {add({3.0, 10}, {5.0, 8}, 2.0), add({5.0, 8}, {3.0, 10}, 2.0)}) {
    EXPECT_EQ(sum.sum, 3.3125);
    EXPECT_EQ(sum.exponent, 10);
  }
}

TEST(ScaledSum, ZeroIsNeutralWhateverItsExponent) {
  const ScaledSum sum = add({0.0, 900}, {1.0, -900}, 2.0);
  EXPECT_EQ(sum.sum, 1.0);
  EXPECT_EQ(sum.exponent, -900);
}

TEST(ScaledSum, FarApartExponentsLoseTheSmallOne) {
  const ScaledSum sum = add({1.0, 1000}, {1.0, -1070}, 4.0);
  EXPECT_EQ(sum.sum, 1.0);
  EXPECT_EQ(sum.exponent, 1000);
}

TEST(ScaledSum, RootsOfEveryOrder) {
  EXPECT_EQ(root({8.0, 3}, {1.0}), 64.0);
  EXPECT_EQ(root({9.0, 2}, {2.0}), 12.0);
  EXPECT_EQ(root({16.0, 1}, {4.0}), 4.0);
  EXPECT_NEAR(root({27.0, 0}, {3.0}), 3.0, 1e-15);
  EXPECT_NEAR(root({32.0, 0}, {2.5}), 4.0, 1e-15);
  EXPECT_EQ(root({0.0, 100}, {2.0}), 0.0);
}

TEST(ScaledSum, SquaresBeyondFloat64HaveAFiniteNorm) {
  // Two elements of 2^1000: the sum of squares is 2^2001.
  const ScaledSum one{1.0, 1000};
  EXPECT_EQ(root(add(one, one, 2.0), {2.0}), std::ldexp(std::sqrt(2.0), 1000));
}

TEST(ScaledSum, PowerOfInvertsRoot) {
  for (const double norm : {1e-300, 0.1, 1.0, 12345.678, 1e300}) {
    for (const double p : {1.0, 2.0, 3.0, 2.5}) EXPECT_NEAR(root(power_of(norm, {p}), {p}) / norm, 1.0, 1e-14);
  }
}

TensorStatistics of(ChunkStatistics chunk, std::uint32_t count, std::uint64_t position, NormOrder order) {
  TensorStatistics tensor;
  append(tensor, chunk, count, position, order);
  return tensor;
}

TEST(TensorStatistics, NanAndInfinityDecideTheNorm) {
  ChunkStatistics chunk;
  chunk.power_sum = 25.0;
  chunk.max_abs = 4.0;
  EXPECT_EQ(of(chunk, 2, 0, {2.0}).norm({2.0}), 5.0);
  EXPECT_EQ(of(chunk, 2, 0, {kInfinity}).norm({kInfinity}), 4.0);
  chunk.neginf = 1;
  EXPECT_EQ(of(chunk, 3, 0, {2.0}).norm({2.0}), kInfinity);
  EXPECT_EQ(of(chunk, 3, 0, {kInfinity}).norm({kInfinity}), kInfinity);
  chunk.nan = 1;
  EXPECT_TRUE(std::isnan(of(chunk, 4, 0, {2.0}).norm({2.0})));
  EXPECT_TRUE(std::isnan(of(chunk, 4, 0, {kInfinity}).norm({kInfinity})));
}

TEST(TensorStatistics, FirstNonfiniteIsTheSmallestPosition) {
  ChunkStatistics clean, dirty;
  dirty.nan = 1;
  dirty.first_nonfinite = 3;
  TensorStatistics tensor;
  append(tensor, clean, 65536, 0, {2.0});
  EXPECT_EQ(tensor.first_nonfinite, kNowhere);
  append(tensor, dirty, 10, 65536, {2.0});
  append(tensor, dirty, 10, 131072, {2.0});
  EXPECT_EQ(tensor.first_nonfinite, 65539u);
}

TEST(TensorStatistics, CountsAndExtremesAddUp) {
  ChunkStatistics a, b;
  a.zeros = 2, a.subnormals = 1, a.max_abs = 3.0, a.min_abs = 0.5, a.signed_sum = 4.0, a.posinf = 1;
  b.zeros = 1, b.max_abs = 2.0, b.min_abs = 0.25, b.signed_sum = -10.0;
  TensorStatistics sum = of(a, 8, 0, {2.0});
  add(sum, of(b, 8, 0, {2.0}), {2.0});
  EXPECT_EQ(sum.elements, 16u);
  EXPECT_EQ(sum.zeros, 3u);
  EXPECT_EQ(sum.subnormals, 1u);
  EXPECT_EQ(sum.nonfinite(), 1u);
  EXPECT_EQ(sum.max_abs, 3.0);
  EXPECT_EQ(sum.min_abs, 0.25);
  EXPECT_EQ(sum.mean(), -6.0 / 16.0);
}

TEST(TensorStatistics, EmptyTensor) {
  const TensorStatistics empty;
  EXPECT_EQ(empty.norm({2.0}), 0.0);
  EXPECT_EQ(empty.norm({kInfinity}), 0.0);
  EXPECT_TRUE(std::isnan(empty.mean()));
}

}  // namespace
}  // namespace gradclip
