#pragma once
// The text of an option's value as what it says.

#include <cstdint>
#include <optional>
#include <string_view>

namespace gradclip {

/// A number in decimal ("1e-3"), hexadecimal ("0x1.8p+1"), or "inf", "-inf", "nan". Empty for anything else, including
/// numbers beyond float64's range such as 1e400 and 1e-400.
[[nodiscard]] std::optional<double> parse_number(std::string_view text) noexcept;
/// A decimal integer in [low, high].
[[nodiscard]] std::optional<std::int64_t> parse_integer(std::string_view text, std::int64_t low,
                                                        std::int64_t high) noexcept;
/// Bytes: "4096", "1.5G" (powers of 1000: K M G T), "512Mi" (powers of 1024: Ki Mi Gi Ti), an ending B allowed. At
/// least 1.
[[nodiscard]] std::optional<std::uint64_t> parse_size(std::string_view text) noexcept;
/// "1", "true", "yes", "on" and their opposites.
[[nodiscard]] std::optional<bool> parse_boolean(std::string_view text) noexcept;

}  // namespace gradclip
