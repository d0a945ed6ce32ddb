#include "gradclip/synth/synthetic_values.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace gradclip {
namespace {

TEST(SyntheticValues, PiecesAreThoseOfTheWhole) {
  const SyntheticTensor tensor(3, "weight", 0.5);
  std::vector<std::byte> whole(1000 * 2), piece(17 * 2);
  tensor.fill(0, 1000, DType::bfloat16, whole.data());
  tensor.fill(501, 17, DType::bfloat16, piece.data());
  EXPECT_EQ(std::memcmp(whole.data() + 501 * 2, piece.data(), piece.size()), 0);
}

TEST(SyntheticValues, NearlyNormalAndNarrowerThanTheScale) {
  for (const char* name : {"a", "b", "layers.0.weight"}) {
    const SyntheticTensor tensor(1, name, 2.0);
    double sum = 0.0, squares = 0.0, fourth = 0.0;
    constexpr int kCount = 200'000;
    for (int i = 0; i < kCount; ++i) {
      const double x = tensor.value(static_cast<std::uint64_t>(i));
      sum += x;
      squares += x * x;
      fourth += x * x * x * x;
    }
    const double deviation = std::sqrt(squares / kCount);
    EXPECT_GE(deviation, 0.5 * 0.99) << name;
    EXPECT_LE(deviation, 2.0 * 1.01) << name;
    EXPECT_NEAR(sum / kCount, 0.0, 0.01) << name;
    EXPECT_NEAR(fourth / kCount / std::pow(deviation, 4), 2.7, 0.05) << name;  // 3 - 6 / 5 / 4 of four uniform numbers
  }
}

TEST(SyntheticValues, SeedAndNameBothCount) {
  const double here = SyntheticTensor(1, "a", 1.0).value(5);
  EXPECT_NE(here, SyntheticTensor(2, "a", 1.0).value(5));
  EXPECT_NE(here, SyntheticTensor(1, "b", 1.0).value(5));
  EXPECT_EQ(here, SyntheticTensor(1, "a", 1.0).value(5));
}

}  // namespace
}  // namespace gradclip
