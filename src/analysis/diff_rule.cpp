#include "gradclip/analysis/diff_rule.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gradclip/base/dispatch.hpp"
#include "gradclip/base/element.hpp"

namespace gradclip {
namespace {

/// Position among the type's numbers in ascending order, 0 for both zeros.
template <DType D>
std::int64_t place(double x) {
  const BitsOf<D> bits = Element<D>::round(static_cast<ComputeOf<D>>(x));
  const auto magnitude = static_cast<std::int64_t>(magnitude_bits<D>(bits));
  return (bits & Element<D>::kSign) != 0 ? -magnitude : magnitude;
}

}  // namespace

DType narrower_of(DType a, DType b) {
  return epsilon_of(a) >= epsilon_of(b) ? a : b;
}

ElementRule element_rule(const DiffRule& rule, DType a, DType b) noexcept {
  const DType narrower = narrower_of(a, b);
  return {rule.relative.value_or(epsilon_of(narrower)), rule.absolute, rule.ulps, rule.equal_nan, narrower};
}

std::uint64_t ulps_between(DType dtype, double a, double b) noexcept {
  if (a == b) return 0;
  if (is_float8(dtype)) {
    const int exponent = std::ilogb(std::max(std::abs(a), std::abs(b)));
    const double steps = std::ceil(std::abs(a - b) / std::ldexp(epsilon_of(dtype), exponent));
    return steps < 0x1p63 ? static_cast<std::uint64_t>(steps) : std::numeric_limits<std::uint64_t>::max();
  }
  return with_dtype(dtype, [&]<DType D>() -> std::uint64_t {
    const std::int64_t x = place<D>(a), y = place<D>(b);
    return x > y ? static_cast<std::uint64_t>(x) - static_cast<std::uint64_t>(y)
                 : static_cast<std::uint64_t>(y) - static_cast<std::uint64_t>(x);
  });
}

bool ElementRule::equal(double a, double b) const noexcept {
  if (a == b) return true;
  if (std::isnan(a) || std::isnan(b)) return equal_nan && std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return false;
  if (ulps) return ulps_between(narrower, a, b) <= *ulps;
  return std::abs(a - b) <= absolute + relative * std::abs(b);
}

}  // namespace gradclip
