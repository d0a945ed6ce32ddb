#include "option_values.hpp"

#include <charconv>
#include <cmath>
#include <system_error>

namespace gradclip {
namespace {

/// Text and magnitude of a number without its sign.
std::optional<double> unsigned_number(std::string_view text) noexcept {
  std::chars_format format = std::chars_format::general;
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) {
    format = std::chars_format::hex;
    text.remove_prefix(2);
  }
  if (text.empty() || text.front() == '-' || text.front() == '+') return std::nullopt;
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, format);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  // from_chars takes "inf" and "nan" after "0x" too.
  if (format == std::chars_format::hex && !std::isfinite(value)) return std::nullopt;
  return value;
}

}  // namespace

std::optional<double> parse_number(std::string_view text) noexcept {
  bool negative = false;
  if (!text.empty() && (text.front() == '-' || text.front() == '+')) {
    negative = text.front() == '-';
    text.remove_prefix(1);
  }
  const std::optional<double> magnitude = unsigned_number(text);
  if (!magnitude) return std::nullopt;
  return negative ? -*magnitude : *magnitude;
}

std::optional<std::int64_t> parse_integer(std::string_view text, std::int64_t low, std::int64_t high) noexcept {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> parse_size(std::string_view text) noexcept {
  if (text.size() > 1 && (text.back() == 'B' || text.back() == 'b')) text.remove_suffix(1);
  double base = 1000.0;
  if (text.size() > 1 && (text.back() == 'i' || text.back() == 'I')) {
    base = 1024.0;
    text.remove_suffix(1);
  }
  double unit = 1.0;
  if (!text.empty()) {
    constexpr std::string_view kUnits = "kmgt";
    const char last = static_cast<char>(text.back() | 0x20);
    const std::size_t power = kUnits.find(last);
    if (power != std::string_view::npos) {
      for (std::size_t i = 0; i <= power; ++i) unit *= base;
      text.remove_suffix(1);
    } else if (base == 1024.0) {
      return std::nullopt;
    }
  }
  if (text.empty() || text.find_first_not_of("0123456789.") != std::string_view::npos) return std::nullopt;
  const std::optional<double> value = unsigned_number(text);
  if (!value) return std::nullopt;
  const double bytes = std::floor(*value * unit);
  if (!(bytes >= 1.0) || bytes > 0x1p62) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

std::optional<bool> parse_boolean(std::string_view text) noexcept {
  for (const std::string_view yes : {"1", "true", "yes", "on"}) {
    if (text == yes) return true;
  }
  for (const std::string_view no : {"0", "false", "no", "off"}) {
    if (text == no) return false;
  }
  return std::nullopt;
}

}  // namespace gradclip
