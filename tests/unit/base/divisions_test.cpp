#include "gradclip/base/divisions.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace gradclip {
namespace {

ScaleFactors dividing_by(double divisor) {
  ScaleFactors factors;
  factors.steps[1] = ScaleStep::divide;
  factors.numbers[1] = static_cast<double>(static_cast<float>(divisor));
  return factors;
}

/// Elements of a 16-bit type that a reciprocal scales to other bits than the division: all of both signs are tried.
template <DType D>
int differing(const ScaleFactors& division, double reciprocal) {
  ScaleFactors product = division;
  product.steps[1] = ScaleStep::multiply;
  product.numbers[1] = reciprocal;
  int count = 0;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto element = static_cast<std::uint16_t>(bits);
    count += scale_element<D>(element, division) != scale_element<D>(element, product) ? 1 : 0;
  }
  return count;
}

/// What people divide by: numbers of label tokens over data-parallel sizes, and small ones.
std::vector<double> divisors() {
  std::mt19937 random(3);
  std::vector<double> divisors{3.0, 0.1, 1e-30, 1e30, 1e-41, 2048.0 * 8191.0 / 24.0};
  for (int i = 0; i < 60; ++i) divisors.push_back((1.0 + random() % 4194304u) / (1u + random() % 64u));
  return divisors;
}

template <DType D>
void expect_products_where_they_are_quotients(int* replaced, int* kept) {
  for (const double divisor : divisors()) {
    const ScaleFactors division = dividing_by(divisor);
    const double reciprocal = static_cast<double>(1.0F / static_cast<float>(division.numbers[1]));
    const ScaleFactors result = without_divisions(D, division);
    const int differ = differing<D>(division, reciprocal);
    if (result == division) {
      EXPECT_GT(differ, 0) << divisor;
      ++*kept;
    } else {
      EXPECT_EQ(differ, 0) << divisor;
      EXPECT_EQ(result.steps[1], ScaleStep::multiply);
      EXPECT_EQ(result.numbers[1], reciprocal);
      ++*replaced;
    }
  }
}

TEST(Divisions, AreProductsWhereEveryElementHasTheSameBits) {
  int replaced = 0, kept = 0;
  expect_products_where_they_are_quotients<DType::bfloat16>(&replaced, &kept);
  EXPECT_GT(replaced, 50);
  expect_products_where_they_are_quotients<DType::float16>(&replaced, &kept);
  EXPECT_GT(kept, 0) << "nothing here shows what is refused";
}

TEST(Divisions, ByAPowerOfTwoAreProductsInEveryType) {
  for (const DType dtype : {DType::float64, DType::float32, DType::float16, DType::bfloat16, DType::float8_e4m3fn}) {
    const ScaleFactors result = without_divisions(dtype, dividing_by(8.0));
    EXPECT_EQ(result.steps[1], ScaleStep::multiply);
    EXPECT_EQ(result.numbers[1], 0.125);
  }
}

TEST(Divisions, AreKeptWhereNothingIsProved) {
  for (const DType dtype : {DType::float64, DType::float32, DType::float8_e5m2}) {
    EXPECT_EQ(without_divisions(dtype, dividing_by(3.0)), dividing_by(3.0));
  }
  EXPECT_EQ(without_divisions(DType::float32, dividing_by(0x1p127)), dividing_by(0x1p127));  // no normal reciprocal
  ScaleFactors product = dividing_by(3.0);
  product.steps[1] = ScaleStep::multiply;
  EXPECT_EQ(without_divisions(DType::bfloat16, product), product);
}

}  // namespace
}  // namespace gradclip
