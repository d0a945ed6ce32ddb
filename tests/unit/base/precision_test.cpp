#include "gradclip/base/precision.hpp"

#include <gtest/gtest.h>

#include <cfloat>

namespace gradclip {
namespace {

TEST(Precision, EpsilonOfEveryType) {
  EXPECT_EQ(epsilon_of(DType::float64), DBL_EPSILON);
  EXPECT_EQ(epsilon_of(DType::float32), FLT_EPSILON);
  EXPECT_EQ(epsilon_of(DType::float16), 0x1p-10);
  EXPECT_EQ(epsilon_of(DType::bfloat16), 0x1p-7);
  EXPECT_EQ(epsilon_of(DType::float8_e4m3fn), 0x1p-3);
  EXPECT_EQ(epsilon_of(DType::float8_e5m2), 0x1p-2);
}

TEST(Precision, SmallestNormalOfEveryType) {
  EXPECT_EQ(smallest_normal_of(DType::float64), DBL_MIN);
  EXPECT_EQ(smallest_normal_of(DType::float32), FLT_MIN);
  EXPECT_EQ(smallest_normal_of(DType::float16), 0x1p-14);
  EXPECT_EQ(smallest_normal_of(DType::bfloat16), FLT_MIN);
  EXPECT_EQ(smallest_normal_of(DType::float8_e4m3fn), 0x1p-6);
  EXPECT_EQ(smallest_normal_of(DType::float8_e5m2), 0x1p-14);
}

}  // namespace
}  // namespace gradclip
