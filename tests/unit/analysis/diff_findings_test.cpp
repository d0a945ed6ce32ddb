#include "gradclip/analysis/diff_findings.hpp"

#include "gradclip/analysis/ratio_leftover.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace gradclip {
namespace {

/// B = ratio × A rounded to float32, with noise relative to the largest element.
ParameterDifference scaled(double ratio, double noise = 0.0) {
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  std::vector<float> a(2000), b(2000);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = normal(engine);
    b[i] = static_cast<float>(ratio * static_cast<double>(a[i]) + noise * static_cast<double>(normal(engine)));
  }
  ParameterDifference parameter;
  parameter.rule = element_rule({}, DType::float32, DType::float32);
  parameter.status = DiffStatus::differs;
  const auto view = [](const std::vector<float>& values) {
    return ElementView{reinterpret_cast<const std::byte*>(values.data()), DType::float32, nullptr,
                       smallest_normal_of(DType::float32)};
  };
  parameter.found = compare_elements(view(a), view(b), a.size(), 0, parameter.rule, 0, parameter.worst);
  return parameter;
}

TEST(ConstantRatio, IsFoundThroughRoundings) {
  for (const double ratio : {8.0, 1.0 / 52.0, -3.0, 1e-6}) {
    const auto found = constant_ratio(scaled(ratio));
    ASSERT_TRUE(found) << ratio;
    EXPECT_LE(found->low, ratio * (ratio < 0 ? 0.999999 : 1.000001));
    EXPECT_NEAR(likely_number({found->low - 1e-7 * std::abs(ratio), found->high + 1e-7 * std::abs(ratio)}, {}), ratio,
                1e-6 * std::abs(ratio));
  }
}

TEST(ConstantRatio, IsFoundThroughAnotherOrderOfSums) {
  const auto found = constant_ratio(scaled(8.0, 1e-6));
  ASSERT_TRUE(found);
  EXPECT_LT(found->low, 8.0);
  EXPECT_GT(found->high, 8.0);
}

TEST(ConstantRatio, IsNotFoundInNoise) {
  EXPECT_FALSE(constant_ratio(scaled(8.0, 1e-3)));
  EXPECT_FALSE(constant_ratio(scaled(1.0, 1e-6)));
  EXPECT_FALSE(constant_ratio(scaled(1.0 + 1e-7)));
}

TEST(ConstantRatio, IsNotFoundWhereAnElementDisagrees) {
  ParameterDifference parameter = scaled(2.0);
  parameter.found.nan_different = 1;
  EXPECT_FALSE(constant_ratio(parameter));
  parameter = scaled(2.0);
  parameter.found.ratio_broken = 1;
  EXPECT_FALSE(constant_ratio(parameter));
}

TEST(RatioLeftover, CountsWhatIsOffTheRatio) {
  const auto view = [](const std::vector<float>& values) {
    return ElementView{reinterpret_cast<const std::byte*>(values.data()), DType::float32, nullptr,
                       smallest_normal_of(DType::float32)};
  };
  std::vector<float> a(3000, 1.0F), b(3000, 8.0F);
  a[5] = 1e-39F, b[5] = 8e-39F;  // rounded to 2^-149
  a[6] = b[6] = std::numeric_limits<float>::infinity();
  const double epsilon = epsilon_of(DType::float32);
  EXPECT_EQ(elements_left_over(view(a), view(b), a.size(), 100, 8.0, epsilon).elements, 0u);
  b[2000] = std::nextafter(8.0F, 9.0F);
  EXPECT_EQ(elements_left_over(view(a), view(b), a.size(), 100, 8.0, epsilon).elements, 0u);
  b[2000] = 8.00001F, a[2500] = 1e-6F, b[2500] = 1e-6F, b[7] = 1e-40F;
  const RatioLeftover left = elements_left_over(view(a), view(b), a.size(), 100, 8.0, epsilon);
  EXPECT_EQ(left.elements, 3u);
  EXPECT_EQ(left.at, 107u);
  EXPECT_EQ(left.a, 1.0);
  EXPECT_FLOAT_EQ(static_cast<float>(left.b), 1e-40F);
}

TEST(LikelyNumber, PrefersWhatIsKnown) {
  const std::vector<KnownNumber> known{{53.0, "label tokens"}};
  EXPECT_EQ(likely_number({51.0, 54.0}, known), 53.0);
  EXPECT_EQ(likely_number({1 / 54.0, 1 / 51.0}, known), 1 / 53.0);
  EXPECT_EQ(likely_number({7.9, 8.05}, known), 8.0);
  EXPECT_EQ(likely_number({0.24, 0.26}, known), 0.25);
  EXPECT_EQ(likely_number({-2.01, -1.99}, known), -2.0);
  EXPECT_NEAR(likely_number({1.34, 1.36}, known), 1.35, 1e-12);
}

}  // namespace
}  // namespace gradclip
