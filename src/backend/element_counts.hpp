#pragma once
// How the magnitudes of elements are spread: counts by binary exponent, and what casts to narrower types would do to
// them. Integers, so that a sum of counts does not depend on its order. Worked out in host memory whatever the device:
// whoever reads a gradient has its bytes there.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gradclip/base/dtype.hpp"
#include "gradclip/base/element.hpp"

namespace gradclip {

/// The types that gradients are cast to.
inline constexpr std::array<DType, 4> kCastTypes{DType::float16, DType::bfloat16, DType::float8_e4m3fn,
                                                 DType::float8_e5m2};

/// Finite numbers other than 0 that a cast would change in kind: convert_element() says how it rounds.
struct CastCounts {
  std::uint64_t to_zero = 0;
  std::uint64_t to_subnormal = 0;  ///< of the narrower type, whether the number is one now or not
  std::uint64_t overflow = 0;      ///< beyond its range: infinity, of float8_e4m3fn NaN or saturated

  friend bool operator==(const CastCounts&, const CastCounts&) = default;
};

/// The elements of a tensor, or of several. Each is counted in exactly one of zeros, nan, posinf, neginf and counts.
struct ExponentHistogram {
  std::uint64_t zeros = 0;
  std::uint64_t nan = 0;
  std::uint64_t posinf = 0;
  std::uint64_t neginf = 0;
  int first = 0;                      ///< the smallest exponent that occurs; 0 if there is none
  std::vector<std::uint64_t> counts;  ///< [i]: 2^(first + i) <= |x| < 2^(first + i + 1), up to the largest that occurs
  std::array<CastCounts, kCastTypes.size()> casts;  ///< in the order of kCastTypes

  [[nodiscard]] std::uint64_t finite_nonzero() const noexcept;
  [[nodiscard]] std::uint64_t elements() const noexcept;

  void add(const ExponentHistogram& other);
  /// @pre -1074 <= exponent <= 1023
  void add(int exponent, std::uint64_t count);

  friend bool operator==(const ExponentHistogram&, const ExponentHistogram&) = default;
};

/// The same elements with NaN and infinities replaced by 0.
[[nodiscard]] ExponentHistogram with_nonfinite_zeroed(ExponentHistogram histogram) noexcept;

/// Counts the scaled values of one shard's elements: scale_element(), then element_value().
class ElementCounter {
 public:
  ElementCounter(DType dtype, const ScaleFactors& factors);
  ElementCounter(ElementCounter&&) noexcept;
  ElementCounter& operator=(ElementCounter&&) noexcept;
  ~ElementCounter();

  /// Stored elements in host memory, of any alignment.
  void add(const std::byte* stored, std::size_t count);

  /// Of all that were added.
  [[nodiscard]] ExponentHistogram histogram() const;

 private:
  struct Tables;

  DType dtype_;
  ScaleFactors factors_;
  std::unique_ptr<Tables> tables_;
};

}  // namespace gradclip
