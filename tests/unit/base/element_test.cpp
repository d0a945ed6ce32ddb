// One element: every bit pattern of the narrow types, and the rounding of float32 around every tie.

#include "gradclip/base/element.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference_backend.hpp"

namespace gradclip {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <DType D>
struct Type {
  static constexpr DType kType = D;
};
template <typename T>
class NarrowElements : public testing::Test {};
using NarrowTypes =
    testing::Types<Type<DType::float16>, Type<DType::bfloat16>, Type<DType::float8_e4m3fn>, Type<DType::float8_e5m2>>;
TYPED_TEST_SUITE(NarrowElements, NarrowTypes);

template <typename T>
class Elements : public testing::Test {};
using AllTypes = testing::Types<Type<DType::float64>, Type<DType::float32>, Type<DType::float16>, Type<DType::bfloat16>,
                                Type<DType::float8_e4m3fn>, Type<DType::float8_e5m2>>;
TYPED_TEST_SUITE(Elements, AllTypes);

template <DType D>
std::uint64_t round_bits(double x) {
  return Element<D>::round(static_cast<ComputeOf<D>>(x));
}

TYPED_TEST(NarrowElements, WidenEveryPattern) {
  constexpr DType kType = TypeParam::kType;
  for (std::uint32_t bits = 0; bits < 1u << (8 * size_of(kType)); ++bits) {
    const float x = Element<kType>::widen(static_cast<BitsOf<kType>>(bits));
    const double expected = reference::decode(kType, bits);
    if (std::isnan(expected)) {
      ASSERT_EQ(bits_as<std::uint32_t>(x), 0x7FC00000u) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(x), expected) << bits;
      ASSERT_EQ(std::signbit(x), std::signbit(expected)) << bits;
    }
    ASSERT_EQ(is_subnormal<kType>(static_cast<BitsOf<kType>>(bits)), reference::is_subnormal(kType, bits)) << bits;
    ASSERT_EQ(is_finite<kType>(static_cast<BitsOf<kType>>(bits)), std::isfinite(expected)) << bits;
  }
}

TYPED_TEST(NarrowElements, WidenFiniteTakesTheUpperBitsOfAWord) {
  constexpr DType kType = TypeParam::kType;
  constexpr int kBelow = 32 - 8 * static_cast<int>(size_of(kType));
  for (std::uint32_t bits = 0; bits < 1u << (8 * size_of(kType)); ++bits) {
    const auto element = static_cast<BitsOf<kType>>(bits);
    if (!is_finite<kType>(element)) continue;
    const float expected = Element<kType>::widen(element);
    for (const std::uint32_t below : {0u, (1u << kBelow) - 1u}) {
      ASSERT_EQ(bits_as<std::uint32_t>(Element<kType>::widen_finite(bits << kBelow | below)),
                bits_as<std::uint32_t>(expected))
          << bits;
    }
  }
}

TYPED_TEST(NarrowElements, RoundUndoesWidenAndMakesNanCanonical) {
  constexpr DType kType = TypeParam::kType;
  for (std::uint32_t i = 0; i < 1u << (8 * size_of(kType)); ++i) {
    const auto bits = static_cast<BitsOf<kType>>(i);
    const float x = Element<kType>::widen(bits);
    ASSERT_EQ(Element<kType>::round(x), std::isnan(x) ? Element<kType>::kCanonicalNan : bits) << i;
  }
}

TYPED_TEST(NarrowElements, RoundsTiesAndTheirNeighbours) {
  constexpr DType kType = TypeParam::kType;
  for (std::uint64_t bits = 0; bits < Element<kType>::kNonfinite; ++bits) {
    const double lower = reference::decode(kType, bits);
    const double step = lower - (bits == 0 ? -reference::decode(kType, 1) : reference::decode(kType, bits - 1));
    for (const double distance : {0.25, 0.5, 0.75, 1.0}) {
      const auto at = static_cast<float>(lower + distance * step);
      for (const float x : {at, std::nextafter(at, 0.0F), std::nextafter(at, std::numeric_limits<float>::infinity())}) {
        ASSERT_EQ(Element<kType>::round(x), reference::encode(kType, static_cast<double>(x))) << std::hexfloat << x;
        ASSERT_EQ(Element<kType>::round(-x), reference::encode(kType, static_cast<double>(-x))) << std::hexfloat << -x;
      }
    }
  }
}

TYPED_TEST(NarrowElements, RoundsPatternsOfAllFloats) {
  constexpr DType kType = TypeParam::kType;
  for (std::uint64_t pattern = 0; pattern <= 0xFFFFFFFFu; pattern += 9973) {
    const float x = bits_as<float>(static_cast<std::uint32_t>(pattern));
    ASSERT_EQ(Element<kType>::round(x), reference::encode(kType, static_cast<double>(x))) << std::hexfloat << x;
  }
}

TYPED_TEST(NarrowElements, OverflowAndSpecialNumbers) {
  constexpr DType kType = TypeParam::kType;
  const std::uint64_t sign = Element<kType>::kSign;
  constexpr bool kHasInfinity = kType != DType::float8_e4m3fn;
  const std::uint64_t above = kHasInfinity ? Element<kType>::kNonfinite : Element<kType>::kCanonicalNan;
  const std::uint64_t below = kHasInfinity ? above | sign : Element<kType>::kCanonicalNan;
  for (const double x : {3.4e38, kInfinity}) {
    EXPECT_EQ(round_bits<kType>(x), above);
    EXPECT_EQ(round_bits<kType>(-x), below);
  }
  EXPECT_EQ(round_bits<kType>(0.0), 0u);
  EXPECT_EQ(round_bits<kType>(-0.0), sign);
  EXPECT_EQ(round_bits<kType>(1e-45), 0u);
  EXPECT_EQ(round_bits<kType>(-1e-45), sign);
  EXPECT_EQ(Element<kType>::round(bits_as<float>(0xFFFFFFFFu)), Element<kType>::kCanonicalNan);
  EXPECT_EQ(Element<kType>::round(bits_as<float>(0x7F800001u)), Element<kType>::kCanonicalNan);
}

TEST(NarrowElements, KnownValues) {
  EXPECT_EQ(Element<DType::bfloat16>::widen(0x3F95), 1.1640625F);
  EXPECT_EQ(Element<DType::float8_e4m3fn>::widen(0x7E), 448.0F);
  EXPECT_EQ(Element<DType::float8_e4m3fn>::widen(0x78), 256.0F);
  EXPECT_EQ(Element<DType::float8_e4m3fn>::round(464.0F), 0x7E);  // the tie goes to the even 448
  EXPECT_EQ(Element<DType::float8_e4m3fn>::round(464.1F), 0x7F);
  EXPECT_EQ(Element<DType::float8_e5m2>::round(61439.0F), 0x7B);
  EXPECT_EQ(Element<DType::float8_e5m2>::round(61440.0F), 0x7C);
  EXPECT_EQ(Element<DType::float16>::round(65519.0F), 0x7BFF);
  EXPECT_EQ(Element<DType::float16>::round(65520.0F), 0x7C00);
}

TEST(NarrowElements, Float16AsTheCompilerConverts) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float x = Element<DType::float16>::widen(bits);
    const auto compilers = static_cast<float>(bits_as<_Float16>(bits));
    ASSERT_TRUE(x == compilers || (std::isnan(x) && std::isnan(compilers))) << i;
  }
  for (std::uint64_t pattern = 0; pattern <= 0xFFFFFFFFu; pattern += 4999) {
    const float x = bits_as<float>(static_cast<std::uint32_t>(pattern));
    if (std::isnan(x)) continue;
    ASSERT_EQ(Element<DType::float16>::round(x), bits_as<std::uint16_t>(static_cast<_Float16>(x)))
        << std::hexfloat << x;
  }
}

TEST(Float32And64, RoundOnlyMakesNanCanonical) {
  EXPECT_EQ(Element<DType::float32>::round(bits_as<float>(0xFFC12345u)), 0x7FC00000u);
  EXPECT_EQ(Element<DType::float64>::round(bits_as<double>(std::uint64_t{0xFFF0000000000001})), 0x7FF8000000000000u);
  EXPECT_EQ(Element<DType::float32>::round(-0.0F), 0x80000000u);
  EXPECT_EQ(Element<DType::float32>::round(bits_as<float>(1u)), 1u);
  EXPECT_EQ(Element<DType::float64>::round(5e-324), 1u);
}

TYPED_TEST(Elements, WithoutAStepEveryBitStays) {
  constexpr DType kType = TypeParam::kType;
  ScaleFactors factors;
  factors.numbers[0] = 3.0;
  factors.coefficient = 0.5;
  factors.scale_inv = 2.0F;
  EXPECT_FALSE(changes_bits(factors));
  const auto payload = static_cast<BitsOf<kType>>(~BitsOf<kType>{0});
  EXPECT_EQ(scale_element<kType>(payload, factors), payload);
}

TYPED_TEST(Elements, MultiplyingByOneMakesNanCanonicalAndKeepsTheRest) {
  constexpr DType kType = TypeParam::kType;
  ScaleFactors factors;
  factors.clip = ClipStep::in_gradient_precision;
  EXPECT_TRUE(changes_bits(factors));
  EXPECT_EQ(scale_element<kType>(static_cast<BitsOf<kType>>(~BitsOf<kType>{0}), factors),
            Element<kType>::kCanonicalNan);
  for (const std::uint64_t magnitude :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{Element<kType>::kNonfinite} - 1}) {
    const auto bits = static_cast<BitsOf<kType>>(magnitude | Element<kType>::kSign);
    EXPECT_EQ(scale_element<kType>(bits, factors), bits);
  }
}

TYPED_TEST(Elements, CoefficientZeroKeepsSignsAndMakesInfinitiesNan) {
  constexpr DType kType = TypeParam::kType;
  ScaleFactors factors;
  factors.clip = ClipStep::in_gradient_precision;
  factors.coefficient = 0.0;
  const auto scaled = [&](double x) {
    return scale_element<kType>(static_cast<BitsOf<kType>>(round_bits<kType>(x)), factors);
  };
  EXPECT_EQ(scaled(1.5), 0u);
  EXPECT_EQ(scaled(-1.5), Element<kType>::kSign);
  EXPECT_EQ(scaled(kInfinity), Element<kType>::kCanonicalNan);
  EXPECT_EQ(scaled(-kInfinity), Element<kType>::kCanonicalNan);
}

TYPED_TEST(Elements, ZeroNonfiniteIsPositiveZeroAndComesAfterTheDivisions) {
  constexpr DType kType = TypeParam::kType;
  ScaleFactors factors;
  factors.zero_nonfinite = true;
  EXPECT_TRUE(changes_bits(factors));
  for (const double x : {kInfinity, -kInfinity, kNan}) {
    EXPECT_EQ(scale_element<kType>(static_cast<BitsOf<kType>>(round_bits<kType>(x)), factors), 0u);
  }
  const auto minus_zero = Element<kType>::kSign;
  EXPECT_EQ(scale_element<kType>(minus_zero, factors), minus_zero);
  factors.steps[0] = ScaleStep::divide;
  factors.numbers[0] = 0.0;
  EXPECT_EQ(scale_element<kType>(static_cast<BitsOf<kType>>(round_bits<kType>(-1.0)), factors), 0u);  // -1 / 0 = -inf
}

TEST(Scaling, TwoDivisionsRoundTwice) {
  ScaleFactors factors;
  factors.steps[0] = factors.steps[1] = ScaleStep::divide;
  factors.numbers[0] = factors.numbers[1] = 3.0;
  const std::uint16_t ones = Element<DType::bfloat16>::round(1.0F);
  const std::uint16_t third = Element<DType::bfloat16>::round(1.0F / 3.0F);
  const std::uint16_t twice = Element<DType::bfloat16>::round(Element<DType::bfloat16>::widen(third) / 3.0F);
  EXPECT_EQ(scale_element<DType::bfloat16>(ones, factors), twice);
}

TEST(Scaling, ZeroDimensionalTensorsMultiplyInFloat64) {
  ScaleFactors factors;
  factors.clip = ClipStep::in_float64;
  factors.coefficient = 1.0 / 3.0;
  const float x = 0.1F;
  const std::uint32_t in_double = Element<DType::float32>::round(static_cast<float>(static_cast<double>(x) / 3.0));
  const auto product = static_cast<float>(static_cast<double>(x) * factors.coefficient);
  EXPECT_EQ(scale_element<DType::float32>(bits_as<std::uint32_t>(x), factors), bits_as<std::uint32_t>(product));
  EXPECT_NEAR(static_cast<double>(bits_as<float>(in_double)), static_cast<double>(product), 1e-8);
  // double → float → bfloat16 rounds twice: just below a tie goes to the tie, and from there to even, away.
  factors.coefficient = 1.0 + 0x1p-8 - 0x1p-40;
  EXPECT_EQ(scale_element<DType::bfloat16>(0x3F80, factors), 0x3F80);
  factors.coefficient = 1.0 + 0x3p-8 - 0x1p-40;
  EXPECT_EQ(scale_element<DType::bfloat16>(0x3F80, factors), 0x3F82);  // rounded once it would be 0x3F81
}

TEST(Scaling, Float8KeepsScaleInvForItsValue) {
  ScaleFactors factors;
  factors.scale_inv = 0.1F;
  factors.clip = ClipStep::in_gradient_precision;
  factors.coefficient = 0.5;
  EXPECT_EQ(scale_element<DType::float8_e4m3fn>(0x7E, factors), Element<DType::float8_e4m3fn>::round(224.0F));
  EXPECT_EQ(element_value<DType::float8_e4m3fn>(0x7E, 0.1F), 448.0F * 0.1F);
  EXPECT_EQ(element_value<DType::bfloat16>(0x3F80, 0.1F), 1.0F);
}

TEST(Terms, ProductsAreRoundedStepByStep) {
  const double x = -1.1;
  EXPECT_EQ(power_term(x, 1.0), 1.1);
  EXPECT_EQ(power_term(x, 2.0), x * x);
  EXPECT_EQ(power_term(x, 3.0), (x * x) * 1.1);
  EXPECT_EQ(power_term(x, 4.0), (x * x) * (x * x));
  EXPECT_EQ(power_term(x, 2.5), std::pow(1.1, 2.5));
  EXPECT_EQ(power_term(0.0, 0.5), 0.0);
}

TEST(Terms, ExponentsBringTheLargestIntoHalfToOne) {
  EXPECT_EQ(exponent_of(0.0), 0);
  EXPECT_EQ(exponent_of(1.0), 1);
  EXPECT_EQ(exponent_of(0.99), 0);
  EXPECT_EQ(exponent_of(std::numeric_limits<double>::max()), 1024);
  EXPECT_EQ(exponent_of(5e-324), -1021);
  for (const double x : {1.0, 3.7e200, 1e-300, std::numeric_limits<double>::max()}) {
    const double scaled = x * power_of_two(-exponent_of(x));
    EXPECT_GE(scaled, 0.5);
    EXPECT_LT(scaled, 1.0);
  }
  for (int k = -1074; k <= 1023; ++k) EXPECT_EQ(power_of_two(k), std::ldexp(1.0, k));
}

TEST(Terms, TheReferenceRoundsToTheType) {
  constexpr DType kType = DType::bfloat16;
  const auto rounded = [](float x) { return Element<kType>::widen(Element<kType>::round(x)); };
  const float q = rounded(1.0F / 3.0F);
  EXPECT_EQ(reference_term<kType>(-1.0F, 3.0, 1.0), static_cast<double>(q));
  EXPECT_EQ(reference_term<kType>(-1.0F, 3.0, 2.0), static_cast<double>(rounded(q * q)));
  EXPECT_EQ(reference_term<kType>(-1.0F, 3.0, 3.0), static_cast<double>(rounded(rounded(q * q) * q)));
  EXPECT_EQ(reference_term<kType>(-1.0F, 3.0, 2.5), static_cast<double>(rounded(std::pow(q, 2.5F))));
  EXPECT_EQ(reference_term<DType::float64>(-1.0, 3.0, 2.0), (1.0 / 3.0) * (1.0 / 3.0));
  EXPECT_EQ(reference_term<DType::float16>(1e-5F, 1.0, 2.0), 0.0);  // what float16 loses
}

TEST(Partial, NanStaysAndEqualZerosKeepTheFirst) {
  for (const auto operation : {PartialOperation::sum, PartialOperation::avg, PartialOperation::max,
                               PartialOperation::min, PartialOperation::product}) {
    for (const double other : {1.0, -kInfinity, kInfinity, kNan}) {
      EXPECT_EQ(bits_as<std::uint64_t>(combine_values(operation, -kNan, other)), 0x7FF8000000000000u);
      EXPECT_EQ(bits_as<std::uint64_t>(combine_values(operation, other, -kNan)), 0x7FF8000000000000u);
    }
  }
  EXPECT_EQ(bits_as<std::uint64_t>(combine_values(PartialOperation::sum, kInfinity, -kInfinity)), 0x7FF8000000000000u);
  EXPECT_TRUE(std::signbit(combine_values(PartialOperation::max, -0.0, 0.0)));
  EXPECT_FALSE(std::signbit(combine_values(PartialOperation::min, 0.0, -0.0)));
}

TEST(Partial, Operations) {
  EXPECT_EQ(combine_values(PartialOperation::sum, 1.0, 2.0), 3.0);
  EXPECT_EQ(finish_combination(PartialOperation::sum, 3.0, 2.0), 3.0);
  EXPECT_EQ(combine_values(PartialOperation::avg, 1.0, 2.0), 3.0);
  EXPECT_EQ(finish_combination(PartialOperation::avg, 3.0, 2.0), 1.5);
  EXPECT_EQ(combine_values(PartialOperation::max, -1.0, -2.0), -1.0);
  EXPECT_EQ(combine_values(PartialOperation::min, -1.0, -2.0), -2.0);
  EXPECT_EQ(combine_values(PartialOperation::product, 3.0, -2.0), -6.0);
}

}  // namespace
}  // namespace gradclip
