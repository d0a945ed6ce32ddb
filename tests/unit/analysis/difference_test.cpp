#include "gradclip/analysis/difference.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "gradclip/analysis/difference_kernels.hpp"
#include "gradclip/base/element.hpp"

namespace gradclip {
namespace {

using difference::Kernels;

ElementView view(const std::vector<double>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), DType::float64, nullptr,
          smallest_normal_of(DType::float64)};
}
ElementView view(const std::vector<float>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), DType::float32, nullptr,
          smallest_normal_of(DType::float32)};
}

template <class T>
Difference compare(const std::vector<T>& a, const std::vector<T>& b, const DiffRule& rule = {}, std::size_t most = 0,
                   std::vector<WorstElement>* worst = nullptr, std::uint64_t position = 0) {
  std::vector<WorstElement> none;
  const DType dtype = sizeof(T) == 8 ? DType::float64 : DType::float32;
  return compare_elements(view(a), view(b), a.size(), position, element_rule(rule, dtype, dtype), most,
                          worst != nullptr ? *worst : none);
}

std::vector<double> random_numbers(std::size_t count, unsigned seed, double scale = 1.0) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<double> numbers(count);
  for (double& number : numbers) number = scale * normal(engine);
  return numbers;
}

/// Every variant gives the same bits: sums, extremes, counts.
TEST(DifferenceKernels, SameBitsFromEveryInstructionSet) {
  const Kernels* variants[3];
  const std::size_t count = difference::all_kernels(variants);
  const std::vector<double> a = random_numbers(1024, 1), b = random_numbers(1024, 2);
  const difference::TileRule rule{0.5, 0.25, 0x1p-3, 0x1p-3};
  for (std::size_t elements = 16; elements <= 1024; elements += 16) {
    difference::TileSums first_sums;
    difference::TileRatios first_ratios;
    variants[0]->sums(a.data(), b.data(), elements, 0.5, first_sums);
    difference::TileSums of_one;
    variants[0]->sums(a.data(), a.data(), elements, 0.5, of_one);
    EXPECT_EQ(of_one.xx, first_sums.xx);
    variants[0]->ratios(a.data(), b.data(), elements, rule, first_ratios);
    for (std::size_t v = 0; v < count; ++v) {
      EXPECT_EQ(variants[v]->squares(a.data(), elements, 0.5), first_sums.xx) << v << " " << elements;
      difference::TileSums sums;
      difference::TileRatios ratios;
      variants[v]->sums(a.data(), b.data(), elements, 0.5, sums);
      variants[v]->ratios(a.data(), b.data(), elements, rule, ratios);
      EXPECT_EQ(std::memcmp(&sums, &first_sums, sizeof sums), 0) << v << " " << elements;
      EXPECT_EQ(std::memcmp(&ratios, &first_ratios, sizeof ratios), 0) << v << " " << elements;
      EXPECT_EQ(variants[v]->largest(a.data(), elements), variants[0]->largest(a.data(), elements));
    }
  }
}

/// What is not divided changes nothing: extremes over many tiles against divisions one by one, among them numbers whose
/// products with an extreme overflow or vanish.
TEST(DifferenceKernels, ExtremesOfQuotients) {
  const Kernels* variants[3];
  const std::size_t count = difference::all_kernels(variants);
  const difference::TileRule rule{0.5, 0.0, 0x1p-1022, 0x1p-1022};
  std::mt19937 engine(9);
  for (const int range : {2, 60, 1000}) {
    std::uniform_int_distribution<int> exponent(-range, range);
    std::vector<double> a = random_numbers(16 * 1024, 7), b = random_numbers(16 * 1024, 8);
    for (double& number : a) number = std::ldexp(number, exponent(engine));
    for (double& number : b) number = std::ldexp(number, exponent(engine));
    for (std::size_t i = 5000; i < 5003; ++i) a[i] = b[i + 100] = 0.0;
    for (std::size_t i = 0; i < a.size(); i += 5) b[i] = a[i];
    std::vector<difference::TileRatios> found(count);
    difference::TileRatios expected;
    for (std::size_t tile = 0; tile < a.size(); tile += 1024) {
      for (std::size_t i = tile; i < tile + 1024; ++i) {
        if (a[i] == b[i] && a[i] == 0.0) continue;
        if (a[i] != b[i]) {
          expected.largest_relative = std::max(expected.largest_relative, std::abs(a[i] - b[i]) / std::abs(b[i]));
        }
        if (std::abs(a[i]) < 0x1p-1022 || std::abs(b[i]) < 0x1p-1022) continue;
        expected.low = std::min(expected.low, b[i] / a[i]);
        expected.high = std::max(expected.high, b[i] / a[i]);
      }
      for (std::size_t v = 0; v < count; ++v) {
        variants[v]->ratios(a.data() + tile, b.data() + tile, 1024, rule, found[v]);
        ASSERT_EQ(found[v].largest_relative, expected.largest_relative) << v << " " << range << " " << tile;
        ASSERT_EQ(found[v].low, expected.low);
        ASSERT_EQ(found[v].high, expected.high);
      }
    }
  }
}

/// Every number of the 16-bit types, by every variant.
TEST(DifferenceKernels, WidensEveryNumber) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  std::vector<double> wide(all.size());
  const auto expect = [&](const auto& widen) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const double expected = static_cast<double>(widen(all[i]));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(wide[i])) << i;
      } else {
        ASSERT_EQ(std::bit_cast<std::uint64_t>(wide[i]), std::bit_cast<std::uint64_t>(expected)) << i;
      }
    }
  };
  const Kernels* variants[3];
  const std::size_t count = difference::all_kernels(variants);
  for (std::size_t v = 0; v < count; ++v) {
    variants[v]->widen_bfloat16(all.data(), wide.data(), all.size());
    expect([](std::uint16_t bits) { return Element<DType::bfloat16>::widen(bits); });
    variants[v]->widen_float16(all.data(), wide.data(), all.size());
    expect([](std::uint16_t bits) { return Element<DType::float16>::widen(bits); });
  }
}

TEST(Difference, AgreesWithASimpleLoop) {
  for (const std::size_t count : {1u, 15u, 16u, 17u, 1023u, 1024u, 1025u, 5000u}) {
    const std::vector<double> a = random_numbers(count, 3);
    std::vector<double> b = a;
    for (std::size_t i = 0; i < count; i += 7) b[i] *= 1.0 + 1e-9 * static_cast<double>(i + 1);
    const Difference found = compare(a, b, {}, 0, nullptr, 100);
    std::uint64_t different = 0, first = kNowhere, at = kNowhere;
    double dd = 0.0, bb = 0.0, most = 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      const double apart = std::abs(a[i] - b[i]);
      dd += apart * apart;
      bb += b[i] * b[i];
      if (apart > most) {
        most = apart;
        at = 100 + i;
      }
      if (apart <= 0x1p-52 * std::abs(b[i])) continue;
      ++different;
      if (first == kNowhere) first = 100 + i;
    }
    EXPECT_EQ(found.different, different) << count;
    EXPECT_EQ(found.first_different, first);
    EXPECT_EQ(found.max_abs, most);
    EXPECT_EQ(found.max_abs_at, at);
    const double unit = std::ldexp(1.0, 2 * found.sums.exponent);
    EXPECT_NEAR(found.sums.dd * unit, dd, 1e-13 * dd);
    EXPECT_NEAR(found.sums.bb * unit, bb, 1e-13 * bb);
  }
}

TEST(Difference, NoSquareOverflowsOrVanishes) {
  for (const double scale : {1e300, 1e-300, 1e-320}) {
    std::vector<double> a = random_numbers(3000, 4, scale), b = random_numbers(3000, 5, scale);
    const Difference found = compare(a, b);
    const Difference plain = compare(random_numbers(3000, 4), random_numbers(3000, 5));
    EXPECT_NEAR(found.sums.dd / found.sums.bb, plain.sums.dd / plain.sums.bb, scale < 1e-310 ? 1e-3 : 1e-12);
  }
  const Difference opposite = compare(std::vector<double>{1.7e308}, std::vector<double>{-1.7e308});
  EXPECT_TRUE(std::isinf(opposite.max_abs));
  EXPECT_EQ(opposite.different, 1u);
  EXPECT_EQ(opposite.sums.dd, 4 * opposite.sums.bb);
}

TEST(Difference, OneBadElementStandsAlone) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  std::vector<double> a = random_numbers(3000, 6), b = a;
  a[2000] = nan;
  b[2500] = infinity;
  const Difference found = compare(a, b);
  EXPECT_EQ(found.different, 2u);
  EXPECT_EQ(found.nan_different, 1u);
  EXPECT_EQ(found.first_nan, 2000u);
  EXPECT_EQ(found.max_abs, infinity);
  EXPECT_EQ(found.max_abs_at, 2500u);
  EXPECT_EQ(found.sums.dd, 0.0);
  EXPECT_GT(found.sums.aa, 0.0);
}

TEST(Difference, None) {
  const std::vector<float> a{1, 2, 3, 4}, b{1, 2, 3, 4};
  const std::vector<std::uint8_t> a_none{1, 1, 0, 0}, b_none{1, 0, 1, 0};
  ElementView x = view(a), y = view(b);
  x.none = a_none.data();
  y.none = b_none.data();
  std::vector<WorstElement> worst;
  const Difference found = compare_elements(x, y, 4, 0, element_rule({}, DType::float32, DType::float32), 0, worst);
  EXPECT_EQ(found.none, 1u);
  EXPECT_EQ(found.none_different, 2u);
  EXPECT_EQ(found.different, 2u);
  EXPECT_EQ(found.first_different, 1u);
  EXPECT_EQ(found.sums.aa, 16.0);
}

TEST(Difference, Ratios) {
  std::vector<float> a{1, -2, 0, 4}, b{8, -16, 0, 32};
  Difference found = compare(a, b);
  EXPECT_EQ(found.ratio_low, 8.0);
  EXPECT_EQ(found.ratio_high, 8.0);
  EXPECT_EQ(found.ratio_broken, 0u);
  b[2] = 1;
  EXPECT_EQ(compare(a, b).ratio_broken, 1u);
  EXPECT_EQ(compare(a, b).ratio_unknown, 1u);
  b[2] = 0;
  b[0] = 1e-40F;
  EXPECT_EQ(compare(a, b).ratio_broken, 0u);
  EXPECT_EQ(compare(a, b).ratio_unknown, 1u);
  found = compare(a, a);
  EXPECT_EQ(found.ratio_low, 1.0);
  EXPECT_EQ(found.ratio_high, 1.0);
}

TEST(Difference, WorstElements) {
  std::vector<float> a(3000, 0.0F), b(3000, 0.0F);
  b[10] = 1;
  b[2000] = -3;
  b[2999] = 3;
  b[5] = std::numeric_limits<float>::quiet_NaN();
  std::vector<WorstElement> worst;
  compare(a, b, {}, 3, &worst);
  sort_worst(worst, 3);
  ASSERT_EQ(worst.size(), 3u);
  EXPECT_EQ(worst[0].position, 5u);
  EXPECT_EQ(worst[1].position, 2000u);
  EXPECT_EQ(worst[2].position, 2999u);
}

}  // namespace
}  // namespace gradclip
