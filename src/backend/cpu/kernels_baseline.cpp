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

/// @param bits_of   bits of the element at a position, of type D
template <DType D, int p, typename BitsAt>
SubBlock accumulate_rows(std::size_t rows, double scaling, const BitsAt& bits_of) {
  std::array<double, kLanes> power{};
  std::array<double, kLanes> sum{};
  BitsOf<D> largest = 0;
  BitsOf<D> smallest = Element<D>::kNonfinite;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const BitsOf<D> bits = bits_of(row * kLanes + lane);
      largest = std::max(largest, magnitude_bits<D>(bits));
      smallest = std::min(smallest, magnitude_bits<D>(bits));
      double x = value_of<D>(bits, scaling);
      if constexpr (D == DType::float64) x *= scaling;
      if constexpr (p > 0) power[lane] += power_by_products<p>(x);
      sum[lane] += x;
    }
  }
  return {fold(power.data(), kLanes), fold(sum.data(), kLanes), value_of<D>(largest, scaling),
          value_of<D>(smallest, scaling)};
}

template <DType D, int p>
SubBlock accumulate(const void* data, std::size_t rows, double scaling) {
  return accumulate_rows<D, p>(rows, scaling, [&](std::size_t i) { return load<D>(data, i); });
}

template <DType D, int p>
SubBlock accumulate_scaled(const void* data, std::size_t rows, const ScaleFactors& factors, double scaling) {
  return accumulate_rows<D, p>(rows, scaling,
                               [&](std::size_t i) { return scale_element<D>(load<D>(data, i), factors); });
}

template <DType D>
SmallElements count_small(const void* data, std::size_t rows) {
  SmallElements small;
  BitsOf<D> smallest = Element<D>::kSign;  // larger than any magnitude
  for (std::size_t i = 0; i < rows * kLanes; ++i) {
    const BitsOf<D> magnitude = magnitude_bits<D>(load<D>(data, i));
    small.zeros += magnitude == 0;
    small.subnormals += is_subnormal<D>(magnitude);
    if (magnitude != 0) smallest = std::min(smallest, magnitude);
  }
  small.min_abs = smallest == Element<D>::kSign ? std::numeric_limits<double>::infinity()
                                                : static_cast<double>(Element<D>::widen(smallest));
  return small;
}

template <DType D>
void scale(const void* from, void* to, std::size_t count, const ScaleFactors& factors) {
  for (std::size_t i = 0; i < count; ++i) {
    const BitsOf<D> bits = scale_element<D>(load<D>(from, i), factors);
    std::memcpy(static_cast<std::byte*>(to) + i * sizeof bits, &bits, sizeof bits);
  }
}

void look_up(const std::uint8_t* from, std::uint8_t* to, std::size_t count, const std::uint8_t* table) {
  for (std::size_t i = 0; i < count; ++i) to[i] = table[from[i]];
}

template <DType D>
constexpr std::array<Accumulate, kVectorPowers> powers() {
  return {accumulate<D, 0>, accumulate<D, 1>, accumulate<D, 2>, accumulate<D, 3>, accumulate<D, 4>};
}
template <DType D>
constexpr std::array<AccumulateScaled, kVectorPowers> scaled_powers() {
  return {accumulate_scaled<D, 0>, accumulate_scaled<D, 1>, accumulate_scaled<D, 2>, accumulate_scaled<D, 3>,
          accumulate_scaled<D, 4>};
}

}  // namespace

using enum DType;

constinit const Kernels kBaselineKernels{
    "baseline",
    {powers<float64>(), powers<float32>(), powers<float16>(), powers<bfloat16>(), powers<float8_e4m3fn>(),
     powers<float8_e5m2>()},
    {scaled_powers<float64>(), scaled_powers<float32>(), scaled_powers<float16>(), scaled_powers<bfloat16>()},
    {count_small<float64>, count_small<float32>, count_small<float16>, count_small<bfloat16>,
     count_small<float8_e4m3fn>, count_small<float8_e5m2>},
    {scale<float64>, scale<float32>, scale<float16>, scale<bfloat16>},
    look_up};

}  // namespace gradclip::cpu
