// The inner loops in plain C++, for processors without AVX2.

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "gradclip/backend/cpu/kernels.hpp"

namespace gradclip::cpu {
namespace {

template <DType D>
BitsOf<D> load(const void* data, std::size_t i) {
  BitsOf<D> bits;
  std::memcpy(&bits, static_cast<const std::byte*>(data) + i * sizeof bits, sizeof bits);
  return bits;
}

template <DType D, int p>
SubBlock accumulate(const void* data, std::size_t rows, double scaling) {
  std::array<double, kLanes> power{};
  std::array<double, kLanes> sum{};
  BitsOf<D> largest = 0;
  BitsOf<D> smallest = Element<D>::kNonfinite;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const BitsOf<D> bits = load<D>(data, row * kLanes + lane);
      largest = std::max(largest, magnitude_bits<D>(bits));
      smallest = std::min(smallest, magnitude_bits<D>(bits));
      double x = static_cast<double>(Element<D>::widen(bits));
      if constexpr (D == DType::float64) x *= scaling;
      if constexpr (p > 0) power[lane] += power_by_products<p>(x);
      sum[lane] += x;
    }
  }
  return {fold(power.data(), kLanes), fold(sum.data(), kLanes), static_cast<double>(Element<D>::widen(largest)),
          static_cast<double>(Element<D>::widen(smallest))};
}

template <DType D>
SmallElements count_small(const void* data, std::size_t rows) {
  SmallElements small;
  BitsOf<D> smallest = Element<D>::kNonfinite;
  for (std::size_t i = 0; i < rows * kLanes; ++i) {
    const BitsOf<D> magnitude = magnitude_bits<D>(load<D>(data, i));
    small.zeros += magnitude == 0;
    small.subnormals += is_subnormal<D>(magnitude);
    if (magnitude != 0) smallest = std::min(smallest, magnitude);
  }
  small.min_abs = static_cast<double>(Element<D>::widen(smallest));
  return small;
}

template <DType D>
void scale(const void* from, void* to, std::size_t count, const ScaleFactors& factors) {
  for (std::size_t i = 0; i < count; ++i) {
    const BitsOf<D> bits = scale_element<D>(load<D>(from, i), factors);
    std::memcpy(static_cast<std::byte*>(to) + i * sizeof bits, &bits, sizeof bits);
  }
}

template <DType D>
constexpr std::array<Accumulate, kVectorPowers> powers() {
  return {accumulate<D, 0>, accumulate<D, 1>, accumulate<D, 2>, accumulate<D, 3>, accumulate<D, 4>};
}

}  // namespace

constinit const Kernels kBaselineKernels{
    "baseline",
    {powers<DType::float64>(), powers<DType::float32>(), powers<DType::float16>(), powers<DType::bfloat16>()},
    {count_small<DType::float64>, count_small<DType::float32>, count_small<DType::float16>,
     count_small<DType::bfloat16>},
    {scale<DType::float64>, scale<DType::float32>, scale<DType::float16>, scale<DType::bfloat16>}};

}  // namespace gradclip::cpu
