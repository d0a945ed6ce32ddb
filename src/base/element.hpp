#pragma once
// Arithmetic of one element: the only place where gradients are widened, rounded, scaled and combined. Every backend
// calls these functions, so rounding cannot drift between them. Compiled by g++ and by nvcc.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "gradclip/base/dtype.hpp"

#if defined(__CUDACC__)
#define GRADCLIP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GRADCLIP_HOST_DEVICE inline
#endif

/// Keeps an array that a loop goes through in a device's registers.
#if defined(__CUDA_ARCH__)
#define GRADCLIP_UNROLL _Pragma("unroll")
#else
#define GRADCLIP_UNROLL
#endif

namespace gradclip {

/// How a step of the scaling works on an element.
enum class ScaleStep : std::uint8_t { none, divide, multiply };

/// What the clipping product is formed in.
enum class ClipStep : std::uint8_t { none, in_gradient_precision, in_float64 };

/// Everything that happens to an element between storage and result, in this order: steps[0], steps[1], zero_nonfinite,
/// clip. Each step is rounded once to the gradient's type. float64 elements work in float64; the others in float32, and
/// then `numbers` (and `coefficient`, unless clip is in_float64) are exactly float32 numbers already.
struct ScaleFactors {
  double numbers[2] = {1.0, 1.0};
  double coefficient = 1.0;
  double normalizer = 1.0;  ///< what TermArithmetic::reference divides magnitudes by; read by nothing else
  float scale_inv = 1.0F;   ///< float8 only: value = float32(stored × scale_inv), for statistics and combining
  ScaleStep steps[2] = {ScaleStep::none, ScaleStep::none};
  ClipStep clip = ClipStep::none;
  bool zero_nonfinite = false;  ///< NaN and infinities become +0
  bool reference_in_float64 =
      false;  ///< TermArithmetic::reference without roundings: PyTorch's promotion of 0-dim tensors

  [[nodiscard]] bool operator==(const ScaleFactors&) const = default;
};

/// The reduction of a Partial placement.
enum class PartialOperation : std::uint8_t { sum, avg, max, min, product };

// ---------------------------------------------------------------------------------------------------------------------
// Element types
// ---------------------------------------------------------------------------------------------------------------------

/// The bytes of `from` read as a To of the same size.
template <typename To, typename From>
GRADCLIP_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

/// What one element type is. Every Element<D> has
///   Bits                 how it is stored
///   Compute              what its arithmetic is formed in: double for float64, else float
///   kSign                the sign bit; the other bits are the magnitude, which grows with the value
///   kSmallestNormal      smallest magnitude that is not subnormal (nor zero)
///   kNonfinite, kNan     smallest magnitude that is not finite, that is a NaN (float8_e4m3fn has no infinity)
///   kCanonicalNan        the NaN that operations and conversions produce, never negative
///   widen(Bits)          exact; a NaN becomes the canonical one of Compute for types narrower than float32
///   round(Compute)       to nearest even, subnormals kept, overflow to infinity; float8_e4m3fn to NaN,
///                        as PyTorch did before it saturated (2.12)
template <DType D>
struct Element;

template <>
struct Element<DType::float64> {
  using Bits = std::uint64_t;
  using Compute = double;
  static constexpr Bits kSign = 0x8000000000000000u;
  static constexpr Bits kSmallestNormal = 0x0010000000000000u;
  static constexpr Bits kNonfinite = 0x7FF0000000000000u;
  static constexpr Bits kNan = kNonfinite + 1;
  static constexpr Bits kCanonicalNan = 0x7FF8000000000000u;

  static GRADCLIP_HOST_DEVICE double widen(Bits bits) { return bits_as<double>(bits); }
  static GRADCLIP_HOST_DEVICE Bits round(double x) { return x != x ? kCanonicalNan : bits_as<Bits>(x); }
};

template <>
struct Element<DType::float32> {
  using Bits = std::uint32_t;
  using Compute = float;
  static constexpr Bits kSign = 0x80000000u;
  static constexpr Bits kSmallestNormal = 0x00800000u;
  static constexpr Bits kNonfinite = 0x7F800000u;
  static constexpr Bits kNan = kNonfinite + 1;
  static constexpr Bits kCanonicalNan = 0x7FC00000u;

  static GRADCLIP_HOST_DEVICE float widen(Bits bits) { return bits_as<float>(bits); }
  static GRADCLIP_HOST_DEVICE Bits round(float x) { return x != x ? kCanonicalNan : bits_as<Bits>(x); }
};

/// The types narrower than float32: a sign, `exponent_bits`, `mantissa_bits`. Those with infinities have them, as IEEE
/// 754 does, where the exponent's bits are all ones; float8_e4m3fn has numbers there, and one NaN with all bits ones.
template <typename BitsType, int exponent_bits, int mantissa_bits, bool has_infinity, BitsType canonical_nan>
struct NarrowElement {
  using Bits = BitsType;
  using Compute = float;
  static constexpr Bits kSign = static_cast<Bits>(1u << (exponent_bits + mantissa_bits));
  static constexpr Bits kSmallestNormal = static_cast<Bits>(1u << mantissa_bits);
  static constexpr Bits kNonfinite =
      static_cast<Bits>(has_infinity ? ((1u << exponent_bits) - 1u) << mantissa_bits : kSign - 1u);
  static constexpr Bits kNan = static_cast<Bits>(has_infinity ? kNonfinite + 1u : kNonfinite);
  static constexpr Bits kCanonicalNan = canonical_nan;

  static GRADCLIP_HOST_DEVICE float widen(Bits bits) {
    const std::uint32_t magnitude = bits & static_cast<std::uint32_t>(kSign - 1u);
    const std::uint32_t sign = (bits & std::uint32_t{kSign}) << (31 - exponent_bits - mantissa_bits);
    if (magnitude >= kNan) return bits_as<float>(kFloatNan);
    if (kRebias != 0 && magnitude >= kNonfinite) return bits_as<float>(sign | kFloatInfinity);
    if (kRebias != 0 && magnitude < kSmallestNormal) {
      return bits_as<float>(sign | bits_as<std::uint32_t>(static_cast<float>(magnitude) * smallest_subnormal()));
    }
    return bits_as<float>(sign | ((magnitude << kShift) + kRebias));
  }

  /// The same of a finite element that lies in the upper bits of a word, whatever is below it, with no branch.
  static GRADCLIP_HOST_DEVICE float widen_finite(std::uint32_t upper) {
    constexpr std::uint32_t kMagnitude = (std::uint32_t{kSign} - 1u) << (31 - exponent_bits - mantissa_bits);
    const std::uint32_t bits = (upper & kFloatSign) | ((upper & kMagnitude) >> (8 - exponent_bits));
    // Subnormals of the type are subnormals of float32 here, too, so that one product is right for all.
    return kRebias == 0 ? bits_as<float>(bits) : bits_as<float>(bits) * bits_as<float>((254u - kBias) << 23);
  }

  static GRADCLIP_HOST_DEVICE Bits round(float x) {
    if (x != x) return kCanonicalNan;
    const std::uint32_t bits = bits_as<std::uint32_t>(x);
    const std::uint32_t sign = (bits & kFloatSign) >> (31 - exponent_bits - mantissa_bits);
    const std::uint32_t wide = bits & ~kFloatSign;
    std::uint32_t magnitude;
    if (kRebias != 0 && wide < kRebias + kFloatSmallestNormal) {
      magnitude = bits_as<std::uint32_t>(bits_as<float>(wide) + rounder()) - bits_as<std::uint32_t>(rounder());
    } else {
      const std::uint32_t even = (wide >> kShift) & 1u;
      magnitude = (wide - kRebias + (1u << (kShift - 1)) - 1u + even) >> kShift;
    }
    if (kRebias != 0 && magnitude >= kNonfinite)
      return static_cast<Bits>(has_infinity ? sign | kNonfinite : std::uint32_t{kCanonicalNan});
    return static_cast<Bits>(sign | magnitude);
  }

 private:
  static constexpr std::uint32_t kFloatSign = 0x80000000u;
  static constexpr std::uint32_t kFloatSmallestNormal = 0x00800000u;
  static constexpr std::uint32_t kFloatInfinity = 0x7F800000u;
  static constexpr std::uint32_t kFloatNan = 0x7FC00000u;
  static constexpr int kShift = 23 - mantissa_bits;
  static constexpr std::uint32_t kBias = (1u << (exponent_bits - 1)) - 1u;
  static constexpr std::uint32_t kRebias = (127u - kBias) << 23;  ///< 0 for bfloat16: float32 without its last 16 bits

  static GRADCLIP_HOST_DEVICE float smallest_subnormal() {
    return bits_as<float>((127u + 1u - kBias - static_cast<std::uint32_t>(mantissa_bits)) << 23);
  }
  /// A power of two whose last place is the type's smallest subnormal: adding it rounds to a multiple of that.
  static GRADCLIP_HOST_DEVICE float rounder() {
    return bits_as<float>((127u + 1u - kBias - static_cast<std::uint32_t>(mantissa_bits) + 23u) << 23);
  }
};

template <>
struct Element<DType::float16> : NarrowElement<std::uint16_t, 5, 10, true, 0x7E00> {};
template <>
struct Element<DType::bfloat16> : NarrowElement<std::uint16_t, 8, 7, true, 0x7FC0> {};
template <>
struct Element<DType::float8_e4m3fn> : NarrowElement<std::uint8_t, 4, 3, false, 0x7F> {};
template <>
struct Element<DType::float8_e5m2> : NarrowElement<std::uint8_t, 5, 2, true, 0x7F> {};

template <DType D>
using BitsOf = typename Element<D>::Bits;
template <DType D>
using ComputeOf = typename Element<D>::Compute;

/// Whether the type has one byte, so that `scale_inv` applies.
[[nodiscard]] GRADCLIP_HOST_DEVICE constexpr bool is_float8(DType dtype) noexcept {
  return dtype == DType::float8_e4m3fn || dtype == DType::float8_e5m2;
}

template <DType D>
GRADCLIP_HOST_DEVICE BitsOf<D> magnitude_bits(BitsOf<D> bits) {
  return static_cast<BitsOf<D>>(bits & (Element<D>::kSign - 1u));
}
template <DType D>
GRADCLIP_HOST_DEVICE bool is_finite(BitsOf<D> bits) {
  return magnitude_bits<D>(bits) < Element<D>::kNonfinite;
}
template <DType D>
GRADCLIP_HOST_DEVICE bool is_subnormal(BitsOf<D> bits) {
  const BitsOf<D> magnitude = magnitude_bits<D>(bits);
  return magnitude != 0 && magnitude < Element<D>::kSmallestNormal;
}

// ---------------------------------------------------------------------------------------------------------------------
// Scaling and clipping
// ---------------------------------------------------------------------------------------------------------------------

/// Whether scaling by `factors` can change any stored bit. Without a step every byte stays, NaN payloads included.
GRADCLIP_HOST_DEVICE bool changes_bits(const ScaleFactors& factors) {
  return factors.steps[0] != ScaleStep::none || factors.steps[1] != ScaleStep::none || factors.zero_nonfinite ||
         factors.clip != ClipStep::none;
}

/// One step: formed in Compute, rounded once to the type.
template <DType D>
GRADCLIP_HOST_DEVICE BitsOf<D> scale_step(BitsOf<D> bits, ScaleStep step, double number) {
  const ComputeOf<D> x = Element<D>::widen(bits);
  const ComputeOf<D> factor = static_cast<ComputeOf<D>>(number);
  if (step == ScaleStep::divide) return Element<D>::round(x / factor);
  if (step == ScaleStep::multiply) return Element<D>::round(x * factor);
  return bits;
}

/// The clipping product. in_float64, PyTorch's promotion of 0-dim tensors, goes from double to float to the type: two
/// roundings for the narrow types.
template <DType D>
GRADCLIP_HOST_DEVICE BitsOf<D> clip_step(BitsOf<D> bits, ClipStep clip, double coefficient) {
  if (clip == ClipStep::none) return bits;
  const ComputeOf<D> x = Element<D>::widen(bits);
  if (clip == ClipStep::in_float64) {
    return Element<D>::round(static_cast<ComputeOf<D>>(static_cast<double>(x) * coefficient));
  }
  return Element<D>::round(x * static_cast<ComputeOf<D>>(coefficient));
}

/// Stored elements scaled and clipped, in place, a step for all of them after the other, so that what the steps are is
/// asked once. For float8 these are the stored numbers; scale_inv plays no part.
template <DType D, int kCount>
GRADCLIP_HOST_DEVICE void scale_elements(BitsOf<D> (&elements)[kCount], const ScaleFactors& factors) {
  const auto each = [&](auto function) {
    GRADCLIP_UNROLL
    for (int i = 0; i < kCount; ++i) elements[i] = function(elements[i]);
  };
  GRADCLIP_UNROLL
  for (int i = 0; i < 2; ++i) {
    const double number = factors.numbers[i];
    if (factors.steps[i] == ScaleStep::multiply) {
      each([=](BitsOf<D> bits) { return scale_step<D>(bits, ScaleStep::multiply, number); });
    } else if (factors.steps[i] == ScaleStep::divide) {
      each([=](BitsOf<D> bits) { return scale_step<D>(bits, ScaleStep::divide, number); });
    }
  }
  if (factors.zero_nonfinite) {
    each([](BitsOf<D> bits) { return is_finite<D>(bits) ? bits : BitsOf<D>{0}; });
  }
  const double coefficient = factors.coefficient;
  if (factors.clip == ClipStep::in_gradient_precision) {
    each([=](BitsOf<D> bits) { return clip_step<D>(bits, ClipStep::in_gradient_precision, coefficient); });
  } else if (factors.clip == ClipStep::in_float64) {
    each([=](BitsOf<D> bits) { return clip_step<D>(bits, ClipStep::in_float64, coefficient); });
  }
}

/// The stored element that replaces one.
template <DType D>
GRADCLIP_HOST_DEVICE BitsOf<D> scale_element(BitsOf<D> bits, const ScaleFactors& factors) {
  BitsOf<D> element[1] = {bits};
  scale_elements<D>(element, factors);
  return element[0];
}

/// What a stored element (already scaled) is worth: exact, and for float8 float32(stored × scale_inv).
template <DType D>
GRADCLIP_HOST_DEVICE ComputeOf<D> element_value(BitsOf<D> bits, float scale_inv) {
  const ComputeOf<D> x = Element<D>::widen(bits);
  if constexpr (is_float8(D)) {
    const float value = x * scale_inv;
    return Element<DType::float32>::widen(Element<DType::float32>::round(value));
  } else {
    return x;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Terms of the norm
// ---------------------------------------------------------------------------------------------------------------------

/// 2^k, exact. @pre -1074 <= k <= 1023.
GRADCLIP_HOST_DEVICE double power_of_two(int k) {
  if (k < -1022) return bits_as<double>(std::uint64_t{1} << (k + 1074));
  return bits_as<double>(static_cast<std::uint64_t>(k + 1023) << 52);
}

/// ChunkStatistics::exponent of a chunk whose largest finite magnitude is `largest`: the k with largest × 2^-k in [0.5,
/// 1), so that no p overflows; 0 for 0; at least -1021, so that 2^-k is a number.
GRADCLIP_HOST_DEVICE int exponent_of(double largest) {
  if (largest == 0.0) return 0;
  const int k = static_cast<int>(bits_as<std::uint64_t>(largest) >> 52) - 1022;
  return k < -1021 ? -1021 : k;
}

/// |x|^p by products for p = 1, 2, 3, 4: |x|, x·x, (x·x)·|x|, (x·x)·(x·x), each rounded.
template <int p>
GRADCLIP_HOST_DEVICE double power_by_products(double x) {
  static_assert(p >= 1 && p <= 4);
  const double magnitude = ::fabs(x);
  if constexpr (p == 1) return magnitude;
  const double square = x * x;
  if constexpr (p == 2) return square;
  if constexpr (p == 3) return square * magnitude;
  return square * square;
}

/// |x|^p for any p > 0: by products where p allows it, else by pow.
GRADCLIP_HOST_DEVICE double power_term(double x, double p) {
  if (p == 1.0) return power_by_products<1>(x);
  if (p == 2.0) return power_by_products<2>(x);
  if (p == 3.0) return power_by_products<3>(x);
  if (p == 4.0) return power_by_products<4>(x);
  return ::pow(::fabs(x), p);
}

/// The reference's term (TermArithmetic::reference): round(round(|x| / normalizer)^p), both roundings to the gradient's
/// type. p = 2 is a product; p = 3 two products, each rounded to the type, as PyTorch multiplies its scalars (not for
/// float16, which its CPU kernel raises in float32 and rounds once); other p go through powf (float64: pow). Everything
/// is formed in Compute.
template <DType D>
GRADCLIP_HOST_DEVICE double reference_term(ComputeOf<D> x, double normalizer, double p) {
  using Compute = ComputeOf<D>;
  const auto rounded = [](Compute y) { return Element<D>::widen(Element<D>::round(y)); };
  const Compute quotient = rounded((x < Compute{0} ? -x : x) / static_cast<Compute>(normalizer));
  if (p == 2.0) return rounded(quotient * quotient);
  if (p == 3.0 && D != DType::float16) return rounded(rounded(quotient * quotient) * quotient);
  if constexpr (D == DType::float64) return rounded(::pow(quotient, p));
  return rounded(static_cast<Compute>(::powf(static_cast<float>(quotient), static_cast<float>(p))));
}

// ---------------------------------------------------------------------------------------------------------------------
// Partial placements
// ---------------------------------------------------------------------------------------------------------------------

/// Takes one more addend into a reduction over ranks, in float64; a NaN of either side stays, as the canonical one. max
/// and min keep `so_far` where both are equal (±0). sum and avg add; the division of avg is finish_combination's.
GRADCLIP_HOST_DEVICE double combine_values(PartialOperation operation, double so_far, double addend) {
  if (so_far != so_far || addend != addend) return bits_as<double>(Element<DType::float64>::kCanonicalNan);
  double result = so_far;
  switch (operation) {
    case PartialOperation::sum:
    case PartialOperation::avg:
      result = so_far + addend;
      break;
    case PartialOperation::max:
      result = so_far < addend ? addend : so_far;
      break;
    case PartialOperation::min:
      result = addend < so_far ? addend : so_far;
      break;
    case PartialOperation::product:
      result = so_far * addend;
      break;
  }
  return bits_as<double>(Element<DType::float64>::round(result));
}

/// The value of a reduction after its last addend: avg divides once.
GRADCLIP_HOST_DEVICE double finish_combination(PartialOperation operation, double combined, double divisor) {
  const double value = operation == PartialOperation::avg ? combined / divisor : combined;
  return bits_as<double>(Element<DType::float64>::round(value));
}

// ---------------------------------------------------------------------------------------------------------------------
// Accumulation
// ---------------------------------------------------------------------------------------------------------------------

/// An element as one of another type, for float8 with its scale_inv: rounded once, and once more to float32 on the way
/// from float64 to a narrower type, as PyTorch converts. An element of the same type keeps its bits.
template <DType To, DType From>
GRADCLIP_HOST_DEVICE BitsOf<To> convert_element(BitsOf<From> bits, float scale_inv) {
  if constexpr (To == From && !is_float8(From)) {
    return bits;
  } else {
    return Element<To>::round(static_cast<ComputeOf<To>>(element_value<From>(bits, scale_inv)));
  }
}

/// a + b, formed in Compute and rounded once to the type.
template <DType D>
GRADCLIP_HOST_DEVICE BitsOf<D> add_elements(BitsOf<D> a, BitsOf<D> b) {
  return Element<D>::round(Element<D>::widen(a) + Element<D>::widen(b));
}

}  // namespace gradclip
