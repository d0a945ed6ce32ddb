#pragma once
// How two runs of elements differ, and the sum of such findings in a fixed order.

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "gradclip/analysis/diff_rule.hpp"
#include "gradclip/norm/statistics.hpp"

namespace gradclip {

/// The largest part of a tensor, in its 2-norm, that an explanation may leave over: a limit of some epsilons is no
/// limit where the type is coarse or the additions are many.
inline constexpr double kMostUnexplained = 0.1;

/// Sums over pairs of finite values (a, b), each value multiplied by 2^-exponent first, so that no square of a float64
/// number overflows or vanishes.
struct PairSums {
  double aa = 0.0;
  double bb = 0.0;
  double ab = 0.0;
  double dd = 0.0;  ///< of (a - b)^2
  std::int32_t exponent = 0;
};
/// The one with the smaller exponent is brought to the larger first.
[[nodiscard]] PairSums add(const PairSums& a, const PairSums& b) noexcept;

/// What comparing some elements found. Positions are row-major in the global tensor; kNowhere if there is none.
/// Trivially copyable: it travels.
struct Difference {
  std::uint64_t elements = 0;
  std::uint64_t different = 0;       ///< by the rule; includes the next two
  std::uint64_t nan_different = 0;   ///< a NaN on either side
  std::uint64_t none_different = 0;  ///< the gradient is None on one side
  std::uint64_t none = 0;            ///< None on both
  std::uint64_t first_different = kNowhere;
  std::uint64_t first_nan = kNowhere;
  double max_abs = 0.0;  ///< |a - b| of what no NaN is in, with the first position that has it
  std::uint64_t max_abs_at = kNowhere;
  double max_rel = 0.0;  ///< |a - b| / |b| likewise
  std::uint64_t max_rel_at = kNowhere;
  PairSums sums;
  /// Smallest and largest b / a where both reach their type's normal numbers; low > high if nowhere.
  double ratio_low = std::numeric_limits<double>::infinity();
  double ratio_high = -std::numeric_limits<double>::infinity();
  std::uint64_t ratio_unknown = 0;  ///< pairs that are not both 0 and not both normal numbers; most of the next, too
  std::uint64_t ratio_broken = 0;   ///< pairs that no ratio gives: 0 and a normal number, non-finite values, None
};
/// Appends what comes after `to`.
void append(Difference& to, const Difference& next) noexcept;

/// One of the worst elements.
struct WorstElement {
  std::uint64_t position = 0;
  double a = 0.0;
  double b = 0.0;
};
/// A NaN first, then the larger |a - b|, then the smaller position.
[[nodiscard]] bool is_worse(const WorstElement& x, const WorstElement& y) noexcept;
/// Takes one more into the `most` worst, kept as a heap until sort_worst().
void keep_worst(std::vector<WorstElement>& worst, const WorstElement& element, std::size_t most);
void sort_worst(std::vector<WorstElement>& worst, std::size_t most);

/// Elements of one side in host memory: numbers of a type, as they are worth.
struct ElementView {
  const std::byte* data = nullptr;
  DType dtype = DType::float32;        ///< as they stand here; float8 stands as float32
  const std::uint8_t* none = nullptr;  ///< 1 where the gradient is None; null: nowhere
  double smallest_normal = 0.0;        ///< of the type that was recorded
};

/// Compares up to kChunkElements elements, tile by tile: in a tile that is equal byte by byte b is not even widened.
/// @param position  of the first, in the global tensor
/// @param worst     receives the `most` worst of the different elements; not touched if `most` is 0
[[nodiscard]] Difference compare_elements(const ElementView& a, const ElementView& b, std::size_t count,
                                          std::uint64_t position, const ElementRule& rule, std::size_t most,
                                          std::vector<WorstElement>& worst);

/// Elements as float64. @pre dtype is not float8
void widen_elements(const std::byte* from, DType dtype, std::size_t count, double* to);

}  // namespace gradclip
