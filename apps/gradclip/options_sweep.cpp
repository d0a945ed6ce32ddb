#include "options_sweep.hpp"

#include <algorithm>
#include <cmath>

#include "option_values.hpp"

namespace gradclip {
namespace {

constexpr double kPerDecade = 4.0;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::optional<std::vector<double>> range(const std::vector<std::string_view>& parts) {
  if (parts.size() > 3) return std::nullopt;
  const std::optional<double> low = parse_number(parts[0]), high = parse_number(parts[1]);
  if (!low || !high || !(*low > 0.0) || !(*high > *low) || !std::isfinite(*high / *low)) return std::nullopt;
  const double decades = std::log10(*high / *low);
  std::optional<std::int64_t> count = std::max<std::int64_t>(2, std::llround(decades * kPerDecade) + 1);
  if (parts.size() == 3) count = parse_integer(parts[2], 2, static_cast<std::int64_t>(kMostMaxNorms));
  if (!count || *count > static_cast<std::int64_t>(kMostMaxNorms)) return std::nullopt;
  std::vector<double> numbers;
  for (std::int64_t i = 0; i < *count; ++i) {
    const double part = static_cast<double>(i) / static_cast<double>(*count - 1);
    numbers.push_back(*low * std::pow(*high / *low, part));
  }
  numbers.back() = *high;
  return numbers;
}

}  // namespace

std::optional<std::vector<double>> parse_sweep(std::string_view text) {
  const std::vector<std::string_view> ends = split(text, ':');
  if (ends.size() > 1) return range(ends);
  std::vector<double> numbers;
  for (const std::string_view part : split(text, ',')) {
    const std::optional<double> number = parse_number(part);
    if (!number || !(*number >= 0.0)) return std::nullopt;
    numbers.push_back(*number);
  }
  if (numbers.size() > kMostMaxNorms) return std::nullopt;
  return numbers;
}

}  // namespace gradclip
