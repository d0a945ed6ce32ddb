#include "gradclip/analysis/diff_rule.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace gradclip {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(DiffRule, DefaultIsTheEpsilonOfTheNarrowerType) {
  const ElementRule rule = element_rule({}, DType::float32, DType::bfloat16);
  EXPECT_EQ(rule.narrower, DType::bfloat16);
  EXPECT_EQ(rule.relative, 0x1p-7);
  EXPECT_EQ(rule.absolute, 0.0);
  EXPECT_EQ(element_rule({.relative = 0.5}, DType::float64, DType::float64).relative, 0.5);
  EXPECT_EQ(element_rule({.absolute = 0.5}, DType::float64, DType::float64).relative, 0x1p-52);
}

TEST(DiffRule, BothParts) {
  const ElementRule rule = element_rule({.relative = 0.5, .absolute = 0.25}, DType::float64, DType::float64);
  EXPECT_TRUE(rule.equal(1.75, 1.0));
  EXPECT_FALSE(rule.equal(1.7500001, 1.0));
  EXPECT_TRUE(rule.equal(0.25, 0.0));
  EXPECT_FALSE(rule.equal(1.0, 0.25));  // relative to b
}

TEST(DiffRule, NonFiniteValues) {
  const ElementRule strict = element_rule({.relative = kInfinity}, DType::float32, DType::float32);
  EXPECT_TRUE(strict.equal(kInfinity, kInfinity));
  EXPECT_FALSE(strict.equal(kInfinity, -kInfinity));
  EXPECT_FALSE(strict.equal(kInfinity, 1.0));
  EXPECT_FALSE(strict.equal(kNan, kNan));
  EXPECT_FALSE(strict.equal(kNan, 1.0));
  const ElementRule lenient = element_rule({.equal_nan = true}, DType::float32, DType::float32);
  EXPECT_TRUE(lenient.equal(kNan, kNan));
  EXPECT_FALSE(lenient.equal(kNan, 1.0));
}

TEST(DiffRule, Ulps) {
  EXPECT_EQ(ulps_between(DType::float32, 1.0, std::nextafter(1.0F, 2.0F)), 1u);
  EXPECT_EQ(ulps_between(DType::float32, 1.0, std::nextafter(1.0F, 0.0F)), 1u);
  EXPECT_EQ(ulps_between(DType::float32, 0x1p-149, -0x1p-149), 2u);
  EXPECT_EQ(ulps_between(DType::float32, 0.0, -0.0), 0u);
  EXPECT_EQ(ulps_between(DType::bfloat16, 1.0, 1.0 + 0x1p-7), 1u);
  EXPECT_EQ(ulps_between(DType::bfloat16, 1.0, 1.0 + 0x1p-20), 0u);  // one bfloat16 number
  EXPECT_EQ(ulps_between(DType::float16, 2.0, 1.0), 1024u);
  EXPECT_EQ(ulps_between(DType::float64, 1.0, 1.0 + 0x1p-52), 1u);
  EXPECT_EQ(ulps_between(DType::float8_e4m3fn, 1000.0, 1064.0), 1u);  // beyond the type's own numbers: scaled
  const ElementRule rule = element_rule({.ulps = 1}, DType::float32, DType::float32);
  EXPECT_TRUE(rule.equal(1.0, 1.0 + 0x1p-23));
  EXPECT_FALSE(rule.equal(1.0, 1.0 + 0x1p-22));
}

}  // namespace
}  // namespace gradclip
