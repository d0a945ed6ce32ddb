#include "gradclip/backend/cpu/kernels.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "gradclip/backend/cpu/cpu_backend.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip::cpu {
namespace {

int accumulated = 0;
int scaled = 0;

SubBlock spy_accumulate(const void*, std::size_t, double) {
  ++accumulated;
  return {.power_sum = 42.0, .signed_sum = 7.0, .max_abs = 5.0, .min_abs = 3.0};
}
void spy_scale(const void*, void*, std::size_t, const ScaleFactors&) {
  ++scaled;
}

/// A backend computes with the loops that it was given, and with no others.
TEST(Kernels, TheGivenOnesRun) {
  Kernels spy = kBaselineKernels;
  spy.name = "spy";
  for (auto& powers : spy.accumulate) powers.fill(spy_accumulate);
  spy.scale.fill(spy_scale);
  CpuBackend backend(spy);
  EXPECT_EQ(backend.describe().detail, "spy kernels");

  std::vector<float> data(64, 1.0F);
  const Chunk chunk{reinterpret_cast<std::byte*>(data.data()), 64, DType::float32, 0};
  ScaleFactors factors;
  ChunkStatistics result;
  backend.statistics({{&chunk, 1}, {&factors, 1}}, {}, {reinterpret_cast<std::byte*>(&result), sizeof result, {}});
  EXPECT_EQ(accumulated, 1);
  EXPECT_EQ(result.power_sum, 42.0);
  factors.clip = ClipStep::in_gradient_precision;
  backend.scale({{&chunk, 1}, {&factors, 1}});
  EXPECT_EQ(scaled, 1);
}

TEST(Kernels, ByName) {
  for (const Kernels* kernels : supported_kernels()) EXPECT_EQ(&choose_kernels(kernels->name), kernels);
  EXPECT_EQ(&choose_kernels(""), supported_kernels().front());
  EXPECT_EQ(supported_kernels().back(), &kBaselineKernels);
  EXPECT_THROW((void)choose_kernels("AVX2"), Error);
}

TEST(Kernels, VariantsAreDifferentCode) {
  EXPECT_NE(kBaselineKernels.accumulate[1][2], kAvx2Kernels.accumulate[1][2]);
  EXPECT_NE(kAvx2Kernels.accumulate[1][2], kAvx512Kernels.accumulate[1][2]);
}

TEST(Kernels, FoldGoesByHalves) {
  double a[8] = {1e16, 1.0, -1e16, 1.0, 1.0, 1.0, 1.0, 1.0};
  // (1e16 + 1) + (-1e16 + 1), then + ((1 + 1) + (1 + 1)): the ones beside 1e16 are lost or kept as rounding has it.
  const double expected = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
  EXPECT_EQ(fold(a, 8), expected);
}

}  // namespace
}  // namespace gradclip::cpu
