#pragma once
// Whether shards are their tensor, each element once: without a list of elements, and in any order of the shards.

#include <compare>
#include <cstdint>
#include <span>

#include "gradclip/mesh/shard_layout.hpp"

namespace gradclip {

/// How often each element of a tensor is held, as a number of the field of 2^61 - 1. Element (i, j, ...) is the product
/// of x^i, y^j, ... at fixed points x, y, ...; what is held is the sum of its elements. That is a polynomial with the
/// numbers of times as coefficients, at one point: two that differ have the same value there with a probability of at
/// most their degree, the sum of the tensor's extents, in 2^61. (Schwartz, Zippel.)
///
/// A range of indices is a geometric series, so a shard costs a few multiplications for each of its ranges. Trivially
/// copyable.
class Coverage {
 public:
  /// Nothing.
  Coverage() = default;
  /// A shard's elements, each once.
  explicit Coverage(const ShardLayout& layout);

  Coverage& operator+=(Coverage other) noexcept;
  Coverage& operator-=(Coverage other) noexcept;
  /// Each element `times` times as often.
  [[nodiscard]] Coverage times(std::uint64_t times) const noexcept;

  friend auto operator<=>(const Coverage&, const Coverage&) = default;

 private:
  std::uint64_t value_ = 0;
};

}  // namespace gradclip
