#pragma once
// The element types of a gradient.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace gradclip {

enum class DType : std::uint8_t { float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 };

inline constexpr int kDTypeCount = 6;

/// Bytes of one element.
[[nodiscard]] constexpr std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::float64:
      return 8;
    case DType::float32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
      return 1;
  }
  return 0;
}

/// PyTorch's name without "torch.".
[[nodiscard]] std::string_view name(DType dtype) noexcept;

/// The inverse of name(); a leading "torch." is accepted. Empty for anything else.
[[nodiscard]] std::optional<DType> parse_dtype(std::string_view text) noexcept;

/// All names, for messages: "float64, float32, ...".
[[nodiscard]] std::string_view dtype_names() noexcept;

}  // namespace gradclip
