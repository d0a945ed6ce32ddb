#include "gradclip/clip/sweep.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "options_sweep.hpp"

namespace gradclip {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Sweep, CountsClippedStepsAndLeavesNonFiniteOnesOut) {
  const std::vector<StepTotal> steps{{4.0, {}}, {0.5, {}}, {std::nan(""), {}}, {2.0, {}}, {kInfinity, {}}, {1.0, {}}};
  const std::vector<double> max_norms{1.0, 0.0, kInfinity};
  const std::vector<SweepLine> lines = sweep(steps, max_norms);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].max_norm, 1.0);
  EXPECT_EQ(lines[0].steps, 4u);
  EXPECT_EQ(lines[0].clipped, 3u);  // 1 / (1 + 1e-6) is below 1, as it is in PyTorch
  EXPECT_EQ(lines[0].least, clip_coefficient(4.0, 1.0));
  EXPECT_EQ(lines[0].median, (clip_coefficient(2.0, 1.0) + clip_coefficient(1.0, 1.0)) / 2);
  EXPECT_NEAR(lines[0].mean, (0.25 + 0.5 + 1 + 1) / 4, 1e-6);
  EXPECT_EQ(lines[1].clipped, 4u);
  EXPECT_EQ(lines[1].mean, 0.0);
  EXPECT_EQ(lines[2].clipped, 0u);
  EXPECT_EQ(lines[2].least, 1.0);
}

TEST(Sweep, WithoutAFiniteStepThereIsNoCoefficient) {
  const std::vector<StepTotal> steps{{std::nan(""), {}}};
  const std::vector<double> max_norms{1.0};
  const std::vector<SweepLine> lines = sweep(steps, max_norms);
  EXPECT_EQ(lines[0].steps, 0u);
  EXPECT_TRUE(std::isnan(lines[0].median));
}

TEST(Sweep, TakesTheRankThatClipsMost) {
  StepTotal step{2.0, {{.total = 1.0, .ranks = {}}, {.total = 3.0, .dtype = DType::float32, .ranks = {}}}};
  EXPECT_EQ(step_coefficient(step, 2.0), clip_coefficient(3.0, 2.0, DType::float32, true));
  EXPECT_TRUE(step.finite());
  step.totals[0].total = kInfinity;
  EXPECT_FALSE(step.finite());
}

TEST(ParseSweep, RangesAndLists) {
  const auto range = parse_sweep("0.1:10");
  ASSERT_TRUE(range);
  ASSERT_EQ(range->size(), 9u);
  EXPECT_EQ(range->front(), 0.1);
  EXPECT_EQ((*range)[4], 1.0);
  EXPECT_EQ(range->back(), 10.0);
  EXPECT_EQ(parse_sweep("1:16:5"), (std::vector<double>{1, 2, 4, 8, 16}));
  EXPECT_EQ(parse_sweep("2,0,inf"), (std::vector<double>{2, 0, kInfinity}));
  EXPECT_EQ(parse_sweep("0.5:0.6")->size(), 2u);
  for (const char* text : {"", ":", "1:", "0:1", "1:1", "2:1", "1:inf", "1:2:1", "1:2:1001", "1:2:3:4", "1,", "-1",
                           "nan", "1e-308:1e308", "x"}) {
    EXPECT_FALSE(parse_sweep(text)) << text;
  }
}

}  // namespace
}  // namespace gradclip
