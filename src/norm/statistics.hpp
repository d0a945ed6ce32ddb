#pragma once
// Statistics of a tensor, folded from the statistics of its chunks in a fixed order.

#include <cstdint>
#include <limits>

#include "gradclip/backend/chunk_table.hpp"

namespace gradclip {

/// A sum kept in units of 2^exponent, so that squares of float64 numbers cannot overflow: sum × 2^(power × exponent).
struct ScaledSum {
  double sum = 0.0;
  std::int32_t exponent = 0;
};

/// a + b; the one with the smaller exponent is rescaled by 2^(power × difference), exact for an integer power. A zero
/// sum is neutral.
[[nodiscard]] ScaledSum add(ScaledSum a, ScaledSum b, double power) noexcept;

/// (Σ |x|^p)^(1/p) of a sum of powers. @pre order is finite
[[nodiscard]] double root(ScaledSum powers, NormOrder order) noexcept;

/// |x|^p as a sum of one term, for combining norms.
[[nodiscard]] ScaledSum power_of(double norm, NormOrder order) noexcept;

/// norm^p / total^p of a part of a whole: NaN if the total is not finite, 0 if nothing was counted. For p = infinity
/// the limit of that: 1 for the part that the total comes from, else 0.
[[nodiscard]] double share_of(double norm, double total, NormOrder order) noexcept;

inline constexpr std::uint64_t kNowhere = std::numeric_limits<std::uint64_t>::max();

/// Statistics of the scaled values of a shard, a parameter or a whole model. Trivially copyable: it travels between
/// processes.
struct TensorStatistics {
  std::uint64_t elements = 0;
  std::uint64_t zeros = 0;
  std::uint64_t subnormals = 0;
  std::uint64_t nan = 0;
  std::uint64_t posinf = 0;
  std::uint64_t neginf = 0;
  double max_abs = 0.0;                                      ///< largest finite magnitude
  double min_abs = std::numeric_limits<double>::infinity();  ///< smallest non-zero finite magnitude
  ScaledSum powers;                                          ///< Σ |x|^p over finite elements
  ScaledSum signed_sum;                                      ///< Σ x over finite elements
  /// Row-major position of the first non-finite element: in the shard, later in the global tensor. kNowhere if none.
  std::uint64_t first_nonfinite = kNowhere;
  std::int32_t first_nonfinite_rank = -1;  ///< recorded rank

  [[nodiscard]] std::uint64_t nonfinite() const noexcept { return nan + posinf + neginf; }
  /// Σ x / elements; NaN without elements.
  [[nodiscard]] double mean() const noexcept;
  /// The p-norm. NaN if there is a NaN, else infinity if there is an infinity, decided here and not by arithmetic.
  [[nodiscard]] double norm(NormOrder order) const noexcept;
};

/// The same tensor with its NaNs and infinities replaced by 0. They added nothing to the sums.
[[nodiscard]] TensorStatistics with_nonfinite_zeroed(TensorStatistics tensor) noexcept;

/// Appends a chunk. @param position  of the chunk's first element in the tensor
void append(TensorStatistics& tensor, const ChunkStatistics& chunk, std::uint32_t count, std::uint64_t position,
            NormOrder order) noexcept;

/// Adds `other`, which comes after `tensor` in the fixed order. The smaller first_nonfinite is kept (the earlier at a
/// tie).
void add(TensorStatistics& tensor, const TensorStatistics& other, NormOrder order) noexcept;

}  // namespace gradclip
