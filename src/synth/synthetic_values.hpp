#pragma once
// Numbers as a function of seed, parameter and global index alone: however a tensor is cut, it is the same tensor.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "gradclip/base/dtype.hpp"

namespace gradclip {

/// The values of one parameter: nearly normal (the sum of four uniform numbers), mean 0, of a standard deviation that
/// differs between parameters by up to a factor of four.
class SyntheticTensor {
 public:
  /// @param scale  the largest standard deviation
  SyntheticTensor(std::uint64_t seed, std::string_view parameter, double scale) noexcept;

  /// The number at a row-major position of the global tensor, before it is rounded to the type.
  [[nodiscard]] double value(std::uint64_t position) const noexcept;

  /// Stored elements of `count` positions from `position` on.
  void fill(std::uint64_t position, std::uint64_t count, DType dtype, std::byte* to) const;

  /// A number below `bound` that this tensor alone has. @pre bound > 0
  [[nodiscard]] std::uint64_t pick(std::uint64_t bound) const noexcept;

 private:
  std::uint64_t key_;
  double deviation_;
};

/// A number as a stored element. @param to  size_of(dtype) bytes
void store_element(double value, DType dtype, std::byte* to);

}  // namespace gradclip
