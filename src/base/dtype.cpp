#include "gradclip/base/dtype.hpp"

#include <array>

namespace gradclip {
namespace {
constexpr std::array<std::string_view, kDTypeCount> kNames{"float64",  "float32",       "float16",
                                                           "bfloat16", "float8_e4m3fn", "float8_e5m2"};
}  // namespace

std::string_view name(DType dtype) noexcept {
  return kNames[static_cast<std::size_t>(dtype)];
}

std::optional<DType> parse_dtype(std::string_view text) noexcept {
  constexpr std::string_view kPrefix = "torch.";
  if (text.substr(0, kPrefix.size()) == kPrefix) text.remove_prefix(kPrefix.size());
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == text) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::string_view dtype_names() noexcept {
  return "float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2";
}

}  // namespace gradclip
