#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "gradclip/clip/clip.hpp"

namespace gradclip {
namespace {

/// float(max_norm / (torch.tensor(total, dtype=dtype) + 1e-6)), from PyTorch 2.15.
TEST(ClipCoefficient, IsPyTorchsInTheTypeOfTheTotal) {
  EXPECT_EQ(clip_coefficient(2.288212776184082, 0.3, DType::float32, true), 0.1311066448688507);
  EXPECT_EQ(clip_coefficient(7.25, 0.1, DType::float32, true), 0.013793102465569973);
  EXPECT_EQ(clip_coefficient(7.25, 0.1, DType::float64, true), 0.013793101545779098);
  EXPECT_EQ(clip_coefficient(7.25, 0.3, DType::bfloat16, true), 0.041259765625);
  EXPECT_EQ(clip_coefficient(7.25, 0.1, DType::float16, true), 0.0137939453125);
}

TEST(ClipCoefficient, IsAtMostOneAndKeepsNan) {
  EXPECT_EQ(clip_coefficient(0.5, 1.0, DType::float64, false), 1.0);
  EXPECT_TRUE(std::isnan(clip_coefficient(std::nan(""), 1.0, DType::float32, true)));
  EXPECT_EQ(clip_coefficient(3.0, std::numeric_limits<double>::infinity(), DType::float64, false), 1.0);
}

}  // namespace
}  // namespace gradclip
