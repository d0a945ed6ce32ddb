#include "gradclip/report/html_axes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr double kLogarithmicFrom = 50.0;

/// Finite numbers: how many, their range, the smallest above 0.
struct Range {
  bool any = false;
  double low = 0.0;
  double high = 0.0;
  double positive = std::numeric_limits<double>::infinity();
};

Range range_of(std::span<const double> numbers) {
  Range range;
  for (const double number : numbers) {
    if (!std::isfinite(number)) continue;
    range.low = range.any ? std::min(range.low, number) : number;
    range.high = range.any ? std::max(range.high, number) : number;
    if (number > 0.0) range.positive = std::min(range.positive, number);
    range.any = true;
  }
  return range;
}

/// 1, 2 or 5 times a power of ten, at least `least`.
double round_step(double least) {
  const double decade = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * decade >= least * (1 - 1e-9)) return factor * decade;
  }
  return 10.0 * decade;
}

/// 10^e without the roundings of pow.
double power_of_ten(int exponent) {
  return exponent >= 0 ? std::pow(10.0, exponent) : 1.0 / std::pow(10.0, -exponent);
}

}  // namespace

std::string short_number(double number, int digits) {
  std::string text = fmt::format("{:.{}g}", number, digits);
  // "1e+08" is "1e8", "5e-05" is "5e-5", as the script writes them.
  std::size_t exponent = text.find('e');
  if (exponent == std::string::npos) return text;
  if (text[++exponent] == '+') {
    text.erase(exponent, 1);
  } else {
    ++exponent;
  }
  while (text[exponent] == '0' && exponent + 1 < text.size()) text.erase(exponent, 1);
  return text;
}

std::string power_text(std::int64_t exponent) {
  constexpr std::array<std::string_view, 10> kRaised{"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string text = "2";
  for (const char c : fmt::to_string(exponent)) text += c == '-' ? "⁻" : kRaised[static_cast<std::size_t>(c - '0')];
  return text;
}

std::string percentage(double share) {
  constexpr double kLeastWithTwoDigits = 1e-4;
  if (share == 0.0) return "0 %";
  if (std::isnan(share) || std::abs(share) >= kLeastWithTwoDigits) return percent(share);
  return short_number(100.0 * share, 2) + " %";
}

std::string exact_number(double number) {
  return fmt::format("{}", number);
}

std::string count_number(double number) {
  constexpr double kWhole = 9007199254740992.0;
  if (number >= 0.0 && number <= kWhole && number == std::floor(number)) {
    return grouped(static_cast<std::uint64_t>(number));
  }
  return short_number(number);
}

double Axis::place(double number) const {
  if (logarithmic) {
    if (number <= low) return 0.0;
    return std::min(1.0, (std::log10(number) - std::log10(low)) / (std::log10(high) - std::log10(low)));
  }
  return std::clamp((number - low) / (high - low), 0.0, 1.0);
}

std::vector<double> Axis::ticks(std::size_t wanted) const {
  std::vector<double> result;
  if (logarithmic) {
    const int first = static_cast<int>(std::lround(std::log10(low)));
    const int last = static_cast<int>(std::lround(std::log10(high)));
    const int step = std::max(1, (last - first + static_cast<int>(wanted) - 1) / static_cast<int>(wanted));
    for (int exponent = first; exponent <= last; exponent += step) result.push_back(power_of_ten(exponent));
    return result;
  }
  const double step = round_step((high - low) / static_cast<double>(wanted));
  const auto steps = static_cast<std::size_t>((high - low) / step + 1e-9);
  for (std::size_t i = 0; i <= steps; ++i) result.push_back(low + static_cast<double>(i) * step);
  return result;
}

Axis axis_for(std::span<const double> numbers) {
  const Range range = range_of(numbers);
  if (!range.any || range.high <= 0.0) return {};
  if (range.high / range.positive > kLogarithmicFrom) {
    const double below = std::max(std::floor(std::log10(range.positive) - 1e-9), -300.0);
    const double above = std::min(std::ceil(std::log10(range.high) + 1e-9), 308.0);
    return {power_of_ten(static_cast<int>(below)), power_of_ten(static_cast<int>(above)), true};
  }
  if (range.high < 1e-300 || range.high > 1e300) return {0.0, range.high, false};
  const double step = round_step(range.high / 5.0);
  return {0.0, step * std::ceil(range.high / step - 1e-9), false};
}

ColourScale::ColourScale(std::span<const double> numbers) {
  const Range range = range_of(numbers);
  low_ = range.low;
  high_ = range.high;
  lowest_positive_ = range.positive;
  logarithmic_ = range.any && range.low >= 0.0 && range.high > 0.0 && range.high / range.positive > kLogarithmicFrom;
}

std::optional<std::size_t> ColourScale::class_of(double number) const {
  if (!std::isfinite(number)) return std::nullopt;
  double place = number == 0.0 ? 0.0 : 0.5;  // where all are the same
  if (high_ > low_) {
    if (!logarithmic_) {
      place = number / 2 - low_ / 2;  // halves: the difference of float64's extremes is no number
      place /= high_ / 2 - low_ / 2;
    } else if (number > 0.0) {
      place = std::log(number / lowest_positive_) / std::log(high_ / lowest_positive_);
    } else {
      place = 0.0;
    }
  }
  const auto found = static_cast<std::size_t>(std::clamp(place, 0.0, 1.0) * static_cast<double>(kColourClasses));
  return std::min(found, kColourClasses - 1);
}

}  // namespace gradclip
