#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>

#include "gradclip/base/error.hpp"
#include "gradclip/report/names.hpp"
#include "gradclip/report/text_pieces.hpp"
#include "gradclip/report/text_table.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kWidestChart = 80;
constexpr std::size_t kNarrowestChart = 20;
constexpr std::size_t kCastWidth = 10;
constexpr std::size_t kGap = 2;

/// Columns of a chart: each for as many exponents as it takes to show all.
struct Axis {
  int first = 0;
  int last = -1;  ///< below first: there is nothing to show
  int step = 1;   ///< exponents per column
  std::size_t columns = 0;

  [[nodiscard]] std::size_t column(int exponent) const { return static_cast<std::size_t>((exponent - first) / step); }
};

int last_of(const ExponentHistogram& histogram) {
  return histogram.first + static_cast<int>(histogram.counts.size()) - 1;
}

Axis axis_of(const ExponentHistogram& total, std::span<const NormsRow> rows, std::size_t room) {
  Axis axis;
  const auto take = [&](const ExponentHistogram& histogram) {
    if (histogram.counts.empty()) return;
    const bool first = axis.last < axis.first;
    axis.last = first ? last_of(histogram) : std::max(axis.last, last_of(histogram));
    axis.first = first ? histogram.first : std::min(axis.first, histogram.first);
  };
  take(total);
  for (const NormsRow& row : rows) take(*row.histogram);
  const int exponents = axis.last - axis.first + 1;
  axis.step = std::max(1, (exponents + static_cast<int>(room) - 1) / static_cast<int>(room));
  axis.columns = static_cast<std::size_t>((exponents + axis.step - 1) / axis.step);
  return axis;
}

/// "2^-20" where the column of that exponent begins.
std::string axis_text(const Axis& axis) {
  constexpr std::array<int, 9> kSteps{5, 10, 20, 50, 100, 200, 500, 1000, 5000};
  constexpr int kApart = 8;
  const int step = *std::find_if(kSteps.begin(), kSteps.end(), [&](int s) { return s >= kApart * axis.step; });
  std::string text;
  for (int exponent = -2000; exponent <= axis.last; exponent += step) {
    if (exponent < axis.first) continue;
    const std::size_t column = axis.column(exponent);
    if (column < text.size() + (text.empty() ? 0 : 1)) continue;
    text += std::string(column - text.size(), ' ') + fmt::format("2^{}", exponent);
  }
  return text;
}

/// As many columns as the axis has, the highest as high as can be; what is not nothing is seen.
std::string chart(const ExponentHistogram& histogram, const Axis& axis, bool unicode) {
  constexpr std::array<std::string_view, 9> kBlocks{" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr std::array<std::string_view, 9> kLetters{" ", ".", ":", "-", "=", "+", "*", "#", "@"};
  std::vector<std::uint64_t> heights(axis.columns, 0);
  for (std::size_t i = 0; i < histogram.counts.size(); ++i) {
    heights[axis.column(histogram.first + static_cast<int>(i))] += histogram.counts[i];
  }
  const std::uint64_t highest = heights.empty() ? 0 : *std::max_element(heights.begin(), heights.end());
  std::string text;
  for (const std::uint64_t height : heights) {
    const double part = height == 0 ? 0.0 : 8.0 * static_cast<double>(height) / static_cast<double>(highest);
    const auto level = height == 0 ? std::size_t{0} : static_cast<std::size_t>(std::clamp(std::lround(part), 1L, 8L));
    text += unicode ? kBlocks[level] : kLetters[level];
  }
  return text;
}

std::string lost_texts(const ExponentHistogram& histogram) {
  const std::uint64_t all = histogram.finite_nonzero();
  std::string text;
  for (const CastCounts& cast : histogram.casts) {
    text += fmt::format("{:>{}}", part_text(cast.to_zero + cast.overflow, all), kCastWidth);
  }
  return text;
}

/// "float8_e4m3fn" in the width of a column.
std::string_view short_name(DType dtype) {
  const std::string_view text = name(dtype);
  const std::size_t underscore = text.find('_');
  return underscore == std::string_view::npos ? text : text.substr(underscore + 1);
}

void write_casts(const ExponentHistogram& total, const TextStyle& style, std::ostream& out) {
  constexpr std::size_t kNameWidth = 13;
  const std::uint64_t all = total.finite_nonzero();
  const std::size_t width = std::max<std::size_t>(grouped(all).size() + kCastWidth, 14) + kGap;
  const auto cell = [&](std::uint64_t count) {
    return fmt::format("{:>{}}", fmt::format("{}{:>{}}", grouped(count), part_text(count, all), kCastWidth), width);
  };
  out << paint(style, Ink::faint,
               fmt::format("{:<{}}{:>{}}{:>{}}{:>{}}", "cast to", kNameWidth, "underflow to 0", width, "subnormal",
                           width, "overflow", width))
      << '\n';
  for (std::size_t i = 0; i < kCastTypes.size(); ++i) {
    const CastCounts& cast = total.casts[i];
    out << left(name(kCastTypes[i]), kNameWidth) << cell(cast.to_zero) << cell(cast.to_subnormal) << cell(cast.overflow)
        << '\n';
  }
  out << '\n';
}

}  // namespace

void write_histograms(const Report& report, const TableOptions& options, const TextStyle& style, std::ostream& out) {
  const ExponentHistogram& total = *report.norm->histogram;
  std::vector<NormsRow> rows = norms_rows(report, options);
  std::erase_if(rows, [](const NormsRow& row) { return row.histogram == nullptr; });

  constexpr std::size_t kCasts = kCastTypes.size() * kCastWidth;
  std::size_t name_width = 5;
  for (const NormsRow& row : rows) name_width = std::max(name_width, columns(row.label));
  name_width = std::min(name_width, kWidestName);
  std::size_t room = kWidestChart;
  if (style.width != 0) {
    const std::size_t free = style.width > kCasts + kGap ? style.width - kCasts - kGap : 0;
    name_width = std::min(name_width, std::max<std::size_t>(free > kNarrowestChart ? free - kNarrowestChart : 0, 12));
    room = std::clamp(free > name_width ? free - name_width : 0, kNarrowestChart, kWidestChart);
  }
  const Axis axis = axis_of(total, rows, room);
  const std::string ticks = axis_text(axis);
  const std::size_t chart_width = std::max(axis.columns, ticks.size());

  std::string names;
  for (const DType cast : kCastTypes) names += fmt::format("{:>{}}", short_name(cast), kCastWidth);
  out << "binary exponents" << (axis.step > 1 ? fmt::format(", {} a column", axis.step) : std::string())
      << "; right of them what a cast would lose, to 0 or by overflow\n";
  out << paint(style, Ink::faint, left("", name_width) + std::string(kGap, ' ') + left(ticks, chart_width) + names)
      << '\n';
  const auto write_row = [&](const std::string& label, const ExponentHistogram& histogram, Ink ink) {
    const std::string text = left(label, name_width) + std::string(kGap, ' ') +
                             left(chart(histogram, axis, style.unicode), chart_width) + lost_texts(histogram);
    out << paint(style, ink, text) << '\n';
  };
  std::vector<std::string> labels;
  for (const NormsRow& row : rows) labels.push_back(row.label);
  labels = shortened_apart(labels, name_width);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    write_row(labels[i], *rows[i].histogram, rows[i].statistics->nonfinite() != 0 ? Ink::alarm : Ink::plain);
  }
  write_row("total", total, Ink::strong);
  out << '\n';
  write_casts(total, style, out);
}

}  // namespace gradclip
