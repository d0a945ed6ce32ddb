#pragma once
// When two elements count as equal.

#include <cstdint>
#include <optional>

#include "gradclip/base/dtype.hpp"
#include "gradclip/base/precision.hpp"

namespace gradclip {

/// As --rtol, --atol, --ulp and --equal-nan give it.
struct DiffRule {
  std::optional<double> relative =
      std::nullopt;       ///< R of |a - b| <= A + R |b|; empty: the epsilon of the narrower type
  double absolute = 0.0;  ///< A
  std::optional<std::uint64_t> ulps = std::nullopt;  ///< in place of both
  bool equal_nan = false;
};

/// The rule for tensors of two types. a == b is always equal (infinities of one sign, zeros of both); a NaN is
/// different from everything, or, with equal_nan, from everything but a NaN.
struct ElementRule {
  double relative = 0.0;
  double absolute = 0.0;
  std::optional<std::uint64_t> ulps = std::nullopt;
  bool equal_nan = false;
  DType narrower = DType::float32;  ///< whose units in the last place count

  [[nodiscard]] bool equal(double a, double b) const noexcept;
};

/// The one with the larger epsilon.
[[nodiscard]] DType narrower_of(DType a, DType b);
[[nodiscard]] ElementRule element_rule(const DiffRule& rule, DType a, DType b) noexcept;

/// How many numbers of the type lie from a to b, both rounded to it first. For float8, whose scale_inv takes values off
/// the type's own numbers: |a - b| over the distance of neighbours in the binade of the larger magnitude, rounded up.
/// @pre both finite
[[nodiscard]] std::uint64_t ulps_between(DType dtype, double a, double b) noexcept;

}  // namespace gradclip
