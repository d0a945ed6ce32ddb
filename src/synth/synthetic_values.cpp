#include "gradclip/synth/synthetic_values.hpp"

#include <bit>
#include <cmath>
#include <cstring>

#include "gradclip/base/dispatch.hpp"
#include "gradclip/base/element.hpp"
#include "gradclip/dump/checksum.hpp"

namespace gradclip {
namespace {

/// The finalizer of splitmix64: every bit of the input reaches every bit of the output.
std::uint64_t mixed(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio, splitmix64's step

template <DType D>
BitsOf<D> stored(double value) {
  return convert_element<D, DType::float64>(std::bit_cast<std::uint64_t>(value), 1.0F);
}

}  // namespace

SyntheticTensor::SyntheticTensor(std::uint64_t seed, std::string_view parameter, double scale) noexcept
    : key_(mixed(seed + kGolden) ^ xxh3_64(parameter.data(), parameter.size())) {
  deviation_ = scale * (0.25 + 0.75 * static_cast<double>(mixed(~key_) >> 40) * 0x1p-24);
}

double SyntheticTensor::value(std::uint64_t position) const noexcept {
  const std::uint64_t bits = mixed(key_ + position * kGolden);
  const auto sum =
      static_cast<std::int64_t>((bits & 0xFFFFu) + (bits >> 16 & 0xFFFFu) + (bits >> 32 & 0xFFFFu) + (bits >> 48)) -
      131070;
  constexpr double kDeviationOfSum = 37836.6;  // sqrt(4 / 12) × 2^16
  return static_cast<double>(sum) * (deviation_ / kDeviationOfSum);
}

void SyntheticTensor::fill(std::uint64_t position, std::uint64_t count, DType dtype, std::byte* to) const {
  with_dtype(dtype, [&]<DType D>() {
    for (std::uint64_t i = 0; i < count; ++i) {
      const BitsOf<D> element = stored<D>(value(position + i));
      std::memcpy(to + i * sizeof element, &element, sizeof element);
    }
  });
}

std::uint64_t SyntheticTensor::pick(std::uint64_t bound) const noexcept {
  return mixed(key_ - kGolden) % bound;
}

void store_element(double value, DType dtype, std::byte* to) {
  with_dtype(dtype, [&]<DType D>() {
    const BitsOf<D> element = stored<D>(value);
    std::memcpy(to, &element, sizeof element);
  });
}

}  // namespace gradclip
