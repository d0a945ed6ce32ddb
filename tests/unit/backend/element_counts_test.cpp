#include "gradclip/backend/element_counts.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "reference_backend.hpp"

namespace gradclip {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<std::byte> stored(DType dtype, const std::vector<std::uint64_t>& bits) {
  std::vector<std::byte> data(bits.size() * size_of(dtype));
  for (std::size_t i = 0; i < bits.size(); ++i) reference::store(dtype, data.data(), i, bits[i]);
  return data;
}

/// Element by element, with the functions that share no line with element.hpp.
ExponentHistogram expected(DType dtype, const std::vector<std::uint64_t>& bits, const ScaleFactors& factors) {
  ExponentHistogram histogram;
  for (const std::uint64_t element : bits) {
    double x = reference::decode(dtype, reference::scale(dtype, element, factors));
    if (size_of(dtype) == 1) x = static_cast<double>(static_cast<float>(x) * factors.scale_inv);
    if (std::isnan(x)) {
      ++histogram.nan;
    } else if (x == kInfinity) {
      ++histogram.posinf;
    } else if (x == -kInfinity) {
      ++histogram.neginf;
    } else if (x == 0.0) {
      ++histogram.zeros;
    } else {
      histogram.add(std::ilogb(x), 1);
      for (std::size_t i = 0; i < kCastTypes.size(); ++i) {
        const auto by_float = static_cast<double>(static_cast<float>(x));  // as PyTorch converts float64
        const std::uint64_t cast = reference::encode(kCastTypes[i], by_float);
        const double y = reference::decode(kCastTypes[i], cast);
        histogram.casts[i].to_zero += y == 0.0 ? 1 : 0;
        histogram.casts[i].to_subnormal += reference::is_subnormal(kCastTypes[i], cast) ? 1 : 0;
        histogram.casts[i].overflow += std::isfinite(y) ? 0 : 1;
      }
    }
  }
  return histogram;
}

ExponentHistogram counted(DType dtype, const std::vector<std::uint64_t>& bits, const ScaleFactors& factors = {}) {
  const std::vector<std::byte> data = stored(dtype, bits);
  ElementCounter counter(dtype, factors);
  counter.add(data.data(), bits.size());
  return counter.histogram();
}

void expect_equal(const ExponentHistogram& found, const ExponentHistogram& right) {
  EXPECT_EQ(found.zeros, right.zeros);
  EXPECT_EQ(found.nan, right.nan);
  EXPECT_EQ(found.posinf, right.posinf);
  EXPECT_EQ(found.neginf, right.neginf);
  EXPECT_EQ(found.first, right.first);
  EXPECT_EQ(found.counts, right.counts);
  for (std::size_t i = 0; i < kCastTypes.size(); ++i) {
    EXPECT_EQ(found.casts[i].to_zero, right.casts[i].to_zero) << name(kCastTypes[i]);
    EXPECT_EQ(found.casts[i].to_subnormal, right.casts[i].to_subnormal) << name(kCastTypes[i]);
    EXPECT_EQ(found.casts[i].overflow, right.casts[i].overflow) << name(kCastTypes[i]);
  }
}

std::vector<ScaleFactors> scalings() {
  std::vector<ScaleFactors> all(4);
  all[1].steps[0] = ScaleStep::divide;
  all[1].numbers[0] = 3.0;
  all[2].steps[0] = ScaleStep::divide;
  all[2].numbers[0] = static_cast<double>(0.001F);
  all[2].steps[1] = ScaleStep::multiply;
  all[2].numbers[1] = 0.25;
  all[2].zero_nonfinite = true;
  all[3].scale_inv = 0.037F;
  return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Against the reference
// ---------------------------------------------------------------------------------------------------------------------

class NarrowTypes : public testing::TestWithParam<DType> {};

TEST_P(NarrowTypes, EveryPattern) {
  std::vector<std::uint64_t> bits;
  for (std::uint64_t pattern = 0; pattern < std::uint64_t{1} << (8 * size_of(GetParam())); ++pattern) {
    bits.push_back(pattern);
  }
  for (const ScaleFactors& factors : scalings()) {
    const ExponentHistogram right = expected(GetParam(), bits, factors);
    expect_equal(counted(GetParam(), bits, factors), right);
    // Few at a time, where no table of patterns is kept, and of odd counts.
    const std::vector<std::byte> data = stored(GetParam(), bits);
    ExponentHistogram sum;
    for (std::size_t first = 0; first < bits.size(); first += 333) {
      ElementCounter counter(GetParam(), factors);
      counter.add(data.data() + first * size_of(GetParam()), std::min<std::size_t>(333, bits.size() - first));
      sum.add(counter.histogram());
    }
    expect_equal(sum, right);
  }
}

INSTANTIATE_TEST_SUITE_P(All, NarrowTypes,
                         testing::Values(DType::float16, DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2),
                         [](const auto& parameter) { return std::string(name(parameter.param)); });

class WideTypes : public testing::TestWithParam<DType> {
 protected:
  [[nodiscard]] std::uint64_t bits(double x) const { return reference::encode(GetParam(), x); }
};

/// Every place where a cast to a narrower type changes in kind lies at half the distance of two of its numbers: all of
/// these, what is next to them, and powers of two.
TEST_P(WideTypes, BoundariesOfTheCasts) {
  std::vector<std::uint64_t> all;
  const auto take = [&](double x) {
    const std::uint64_t at = bits(x);
    for (const std::uint64_t near : {at - 1, at, at + 1}) {
      all.push_back(near);
      all.push_back(near | std::uint64_t{1} << (8 * size_of(GetParam()) - 1));
    }
  };
  for (const DType cast : kCastTypes) {
    const std::uint64_t last = std::uint64_t{1} << (8 * size_of(cast) - 1);
    for (std::uint64_t pattern = 1; pattern < last; ++pattern) {
      const double x = reference::decode(cast, pattern), before = reference::decode(cast, pattern - 1);
      if (!std::isfinite(x)) {
        if (std::isfinite(before))
          take(before * 1.5), take(before + (before - reference::decode(cast, pattern - 2)) / 2);
        continue;
      }
      if (pattern < 4 || pattern + 3000 > last || std::ilogb(x) != std::ilogb(before)) take(x), take((x + before) / 2);
    }
  }
  take(464.0), take(65520.0), take(61440.0);
  const int lowest = GetParam() == DType::float64 ? -1074 : -149;
  for (int e = lowest; e < (GetParam() == DType::float64 ? 1024 : 128); ++e) take(std::ldexp(1.0, e));
  for (const ScaleFactors& factors : scalings())
    expect_equal(counted(GetParam(), all, factors), expected(GetParam(), all, factors));
}

TEST_P(WideTypes, RandomBits) {
  std::mt19937_64 random(7);
  std::vector<std::uint64_t> all;
  for (int i = 0; i < 40'001; ++i) {
    std::uint64_t element = random();
    if (GetParam() == DType::float32) element &= 0xFFFFFFFFu;
    if (i % 7 == 0) element = bits(std::ldexp(static_cast<double>(random() % 4096), -20));
    all.push_back(element);
  }
  for (const ScaleFactors& factors : scalings())
    expect_equal(counted(GetParam(), all, factors), expected(GetParam(), all, factors));
}

TEST_P(WideTypes, NothingButOneKind) {
  const std::uint64_t sign = std::uint64_t{1} << (8 * size_of(GetParam()) - 1);
  for (const std::uint64_t element : {std::uint64_t{0}, sign, bits(std::nan("")), bits(kInfinity), bits(-kInfinity),
                                      std::uint64_t{1}, bits(1.0), bits(1.0) - 1}) {
    const std::vector<std::uint64_t> all(10'000, element);
    expect_equal(counted(GetParam(), all), expected(GetParam(), all, {}));
  }
}

INSTANTIATE_TEST_SUITE_P(All, WideTypes, testing::Values(DType::float32, DType::float64),
                         [](const auto& parameter) { return std::string(name(parameter.param)); });

// ---------------------------------------------------------------------------------------------------------------------
// By hand
// ---------------------------------------------------------------------------------------------------------------------

/// What becomes of one float64 number: {to zero, to a subnormal, overflow} of each cast, as 'z', 's', 'o' or '.'.
std::string fate(double x) {
  const ExponentHistogram histogram = counted(DType::float64, {reference::encode(DType::float64, x)});
  std::string text;
  for (const CastCounts& cast : histogram.casts) {
    text += cast.to_zero != 0 ? 'z' : cast.to_subnormal != 0 ? 's' : cast.overflow != 0 ? 'o' : '.';
  }
  return text;
}

TEST(CastCounts, ByHand) {
  // float16, bfloat16, float8_e4m3fn, float8_e5m2
  EXPECT_EQ(fate(1.0), "....");
  EXPECT_EQ(fate(448.0), "....");
  EXPECT_EQ(fate(464.0), "....");  // half way to 480, which e4m3fn lacks: ties go to 448, whose last bit is even
  EXPECT_EQ(fate(std::nextafter(464.0F, 1e9F)), "..o.");
  EXPECT_EQ(fate(-465.0), "..o.");
  EXPECT_EQ(fate(61439.99), "..o.");
  EXPECT_EQ(fate(61440.0), "..oo");  // half way from 57344 to 65536
  EXPECT_EQ(fate(65519.99), "..oo");
  EXPECT_EQ(fate(65520.0), "o.oo");
  EXPECT_EQ(fate(3.39e38), "o.oo");
  EXPECT_EQ(fate(std::ldexp(2.0 - std::ldexp(1.0, -8), 127)), "oooo");
  EXPECT_EQ(fate(1e300), "oooo");
  EXPECT_EQ(fate(std::ldexp(1.0, -6)), "....");
  EXPECT_EQ(fate(std::ldexp(1.0, -7)), "..s.");
  EXPECT_EQ(fate(std::ldexp(1.0, -10)), "..z.");  // half of the smallest: ties go to 0
  EXPECT_EQ(fate(std::nextafter(std::ldexp(1.0F, -10), 1.0F)), "..s.");
  EXPECT_EQ(fate(std::ldexp(1.0, -15)), "s.zs");
  EXPECT_EQ(fate(std::ldexp(1.0, -14) - std::ldexp(1.0, -25)), "..z.");  // rounds up to the smallest normal numbers
  EXPECT_EQ(fate(std::ldexp(1.0, -17)), "s.zz");
  EXPECT_EQ(fate(std::ldexp(1.0, -25)), "z.zz");
  EXPECT_EQ(fate(std::ldexp(1.0, -127)), "zszz");
  EXPECT_EQ(fate(std::ldexp(1.0, -134)), "zzzz");
  EXPECT_EQ(fate(5e-324), "zzzz");
}

TEST(ExponentHistogram, ExponentsOfSubnormals) {
  EXPECT_EQ(counted(DType::float32, {1}).first, -149);
  EXPECT_EQ(counted(DType::float32, {0x007FFFFF}).first, -127);
  EXPECT_EQ(counted(DType::float64, {1}).first, -1074);
  EXPECT_EQ(counted(DType::float16, {0x8001}).first, -24);
  EXPECT_EQ(counted(DType::bfloat16, {1}).first, -133);
  EXPECT_EQ(counted(DType::float8_e4m3fn, {1}).first, -9);
}

TEST(ExponentHistogram, AddsUpWhateverTheOrder) {
  const ExponentHistogram a = counted(DType::float32, {0x3F800000, 0x3F800000, 0, 0x7FC00000});
  const ExponentHistogram b = counted(DType::float32, {0x40800000, 0xFF800000, 0x3E800000});
  ExponentHistogram sum = a, other = b;
  sum.add(b);
  other.add(a);
  EXPECT_EQ(sum, other);
  EXPECT_EQ(sum.first, -2);
  EXPECT_EQ(sum.counts, (std::vector<std::uint64_t>{1, 0, 2, 0, 1}));
  EXPECT_EQ(sum.elements(), 7u);
  EXPECT_EQ(sum.finite_nonzero(), 4u);
  const ExponentHistogram zeroed = with_nonfinite_zeroed(sum);
  EXPECT_EQ(zeroed.zeros, 3u);
  EXPECT_EQ(zeroed.elements(), 7u);
}

TEST(ElementCounter, AddsInPieces) {
  std::vector<std::uint64_t> bits;
  for (std::uint64_t i = 0; i < 30'000; ++i) bits.push_back(i * 143'165 % 0x7F800000u);
  const std::vector<std::byte> data = stored(DType::float32, bits);
  ElementCounter counter(DType::float32, {});
  counter.add(data.data(), 0);
  counter.add(data.data(), 4097);
  EXPECT_EQ(counter.histogram().elements(), 4097u);
  counter.add(data.data() + 4097 * 4, 25'903);
  expect_equal(counter.histogram(), expected(DType::float32, bits, {}));
  EXPECT_EQ(ElementCounter(DType::bfloat16, {}).histogram(), ExponentHistogram{});
}

}  // namespace
}  // namespace gradclip
