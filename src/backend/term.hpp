#pragma once
// How a chunk's terms are formed: decisions that every backend makes alike. Compiled by g++ and by nvcc.

#include "gradclip/backend/chunk_table.hpp"
#include "gradclip/base/element.hpp"

namespace gradclip {

/// How a term of the norm is formed where it is formed element by element.
struct Term {
  TermArithmetic arithmetic = TermArithmetic::exact;
  double p = 2.0;
  double normalizer = 1.0;
  double scaling = 1.0;    ///< 2^-exponent
  bool unrounded = false;  ///< ScaleFactors::reference_in_float64

  [[nodiscard]] GRADCLIP_HOST_DEVICE bool infinite() const {
    return bits_as<std::uint64_t>(p) == Element<DType::float64>::kNonfinite;
  }

  /// @param scaled  value × scaling
  template <DType D>
  [[nodiscard]] GRADCLIP_HOST_DEVICE double of(ComputeOf<D> value, double scaled) const {
    if (infinite()) return 0.0;
    if (arithmetic == TermArithmetic::exact) return power_term(scaled, p);
    return unrounded ? reference_term<DType::float64>(static_cast<double>(value), normalizer, p)
                     : reference_term<D>(value, normalizer, p);
  }
};

/// Whether sums of float64 terms taken without scaling have, up to their exponent, the bits of those taken with it: all
/// terms and sums of both are normal, because the magnitudes lie within 2^±(480 / p). `p` is 1, 2, 3, 4 or infinity.
GRADCLIP_HOST_DEVICE bool sums_need_no_scaling(double largest, double smallest, double p) {
  const int order = p <= 4.0 ? static_cast<int>(p) : 1;
  return largest <= power_of_two(480 / order) && smallest >= power_of_two(-(480 / order));
}

/// Sums that were taken without scaling as they are with it: 2^-exponent in each factor.
/// @pre sums_need_no_scaling()
GRADCLIP_HOST_DEVICE void scale_sums(ChunkStatistics& statistics, const Term& term, int exponent) {
  const int p = term.infinite() ? 1 : static_cast<int>(term.p);
  statistics.power_sum *= power_of_two(-p * exponent);
  statistics.signed_sum *= power_of_two(-exponent);
}

/// Whether float8's values are distinct, ordered and finite as its elements are, which only an unusual scale_inv
/// changes: then extremes and counts may be taken from the elements' bits.
template <DType D>
GRADCLIP_HOST_DEVICE bool keeps_order(float scale_inv) {
  if constexpr (is_float8(D)) {
    using Value = Element<DType::float32>;
    const float smallest = element_value<D>(BitsOf<D>{1}, scale_inv);
    const float largest = element_value<D>(static_cast<BitsOf<D>>(Element<D>::kNonfinite - 1), scale_inv);
    return smallest >= bits_as<float>(Value::kSmallestNormal) && largest < bits_as<float>(Value::kNonfinite);
  } else {
    return true;
  }
}

}  // namespace gradclip
