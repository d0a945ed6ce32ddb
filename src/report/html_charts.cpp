#include "gradclip/report/html_charts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "gradclip/report/names.hpp"
#include "gradclip/report/text.hpp"

namespace gradclip {
namespace {

constexpr double kCharacter = 6.6;       // pixels of one, at the size of labels
constexpr double kFixedCharacter = 7.1;  // of names, which are in a font of fixed width
constexpr double kTop = 12;

Attributes svg_attributes(double height, const std::string& description, double width = kChartWidth) {
  return {{"class", width < kChartWidth ? "chart small" : "chart"},
          {"viewBox", fmt::format("0 0 {} {}", pixels(width), pixels(height))},
          {"width", width},
          {"height", height},
          {"role", "img"},
          {"tabindex", "0"},
          {"aria-label", description}};
}

/// Attributes of something to point at.
Attributes mark(const std::string& style, const std::string& tip, const std::string& find) {
  Attributes attributes{{"class", style}, {"data-tip", tip}};
  if (!find.empty()) attributes.emplace_back("data-find", find);
  return attributes;
}

void rectangle(Markup& html, Attributes attributes, double x, double y, double width, double height) {
  attributes.insert(attributes.end(), {{"x", x}, {"y", y}, {"width", width}, {"height", height}});
  html.empty("rect", attributes);
}

void label(Markup& html, std::string_view style, double x, double y, std::string_view text) {
  html.element("text", {{"class", style}, {"x", x}, {"y", y}}, text);
}

void grid_line(Markup& html, std::string_view style, double x1, double y1, double x2, double y2) {
  html.empty("line", {{"class", style}, {"x1", x1}, {"y1", y1}, {"x2", x2}, {"y2", y2}});
}

/// As many characters of the text as fit; none if that says nothing.
std::string fitting(std::string_view text, double width) {
  const auto room = static_cast<std::size_t>(std::max(0.0, width / kCharacter));
  if (columns(text) <= room) return std::string(text);
  return room < 9 ? std::string() : shortened(text, room);
}

/// Labels under an axis of names: all that are no numbers and have room, then as many of the numbers, at equal steps.
void name_labels(Markup& html, const std::vector<ChartName>& names, double left, double step, double y) {
  constexpr double kBetween = 8;
  const auto is_number = [](const std::string& text) {
    return text.find_first_not_of("0123456789") == std::string::npos;
  };
  std::vector<std::pair<double, double>> taken;
  const auto try_label = [&](std::size_t i) {
    const std::string text = columns(names[i].label) > 20 ? shortened(names[i].label, 20) : names[i].label;
    const double middle = left + (static_cast<double>(i) + 0.5) * step;
    const double half = static_cast<double>(columns(text)) * kCharacter / 2 + kBetween / 2;
    const auto touches = [&](const auto& other) { return middle - half < other.second && other.first < middle + half; };
    if (middle + half > kChartWidth + kBetween || std::any_of(taken.begin(), taken.end(), touches)) return;
    taken.emplace_back(middle - half, middle + half);
    label(html, "tick middle", middle, y, text);
  };
  std::size_t widest = 1;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (is_number(names[i].label)) {
      widest = std::max(widest, names[i].label.size());
    } else {
      try_label(i);
    }
  }
  const double room = (static_cast<double>(widest) * kCharacter + kBetween) / step;
  std::size_t every = 1;
  for (const std::size_t steps : {1u, 2u, 5u, 10u, 20u, 50u, 100u, 200u, 500u, 1000u}) {
    every = steps;
    if (static_cast<double>(steps) >= room) break;
  }
  std::size_t number = 0;  // of the numbers so far
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (is_number(names[i].label) && number++ % every == 0) try_label(i);
  }
}

/// Horizontal lines with the axis's numbers at their left.
void value_ticks(Markup& html, const Axis& axis, double left, double right, double top, double bottom) {
  for (const double tick : axis.ticks(6)) {
    const double y = bottom - axis.place(tick) * (bottom - top);
    grid_line(html, "grid", left, y, right, y);
    label(html, "tick end", left - 6, y + 4, short_number(tick));
  }
}

std::vector<double> finite_values(const std::vector<std::optional<double>>& values) {
  std::vector<double> result;
  for (const std::optional<double>& value : values) {
    if (value && std::isfinite(*value)) result.push_back(*value);
  }
  return result;
}

}  // namespace

void write_bar_chart(Markup& html, const BarChart& chart) {
  constexpr double kLeft = 84, kBottom = 250, kHeight = 296, kWidestBar = 64;
  const double right = kChartWidth - (chart.line ? 84 : 8);
  std::vector<double> values;
  std::vector<ChartName> names;
  for (const BarChart::Bar& bar : chart.bars) {
    if (bar.value) values.push_back(*bar.value);
    names.push_back(bar.name);
  }
  if (chart.line) values.push_back(chart.line->value);
  const Axis axis = axis_for(values);
  const double step = (right - kLeft) / static_cast<double>(std::max<std::size_t>(chart.bars.size(), 1));
  const double width = std::min(step - std::min(step * 0.2, 6.0), kWidestBar);

  const Tag svg(html, "svg", svg_attributes(kHeight, chart.description));
  label(html, "axis", 0, 10, chart.y_title + (axis.logarithmic ? ", log scale" : ""));
  value_ticks(html, axis, kLeft, right, kTop + 12, kBottom);
  for (std::size_t i = 0; i < chart.bars.size(); ++i) {
    const BarChart::Bar& bar = chart.bars[i];
    const double x = kLeft + static_cast<double>(i) * step;
    const bool finite = bar.value && std::isfinite(*bar.value);
    const double height = finite ? axis.place(*bar.value) * (kBottom - kTop - 12) : bar.value ? kBottom - kTop - 12 : 0;
    // The whole column answers to the pointer: a short bar is hard to meet.
    const Tag column(html, "g", mark("mark", bar.tip, bar.name.find));
    rectangle(html, {{"class", "reach"}}, x, kTop + 12, step, kBottom - kTop - 12);
    if (bar.value) {
      rectangle(html, {{"class", finite ? "bar" : "bar alarm"}}, x + (step - width) / 2, kBottom - height, width,
                height);
    }
  }
  grid_line(html, "base", kLeft, kBottom, right, kBottom);
  if (chart.line) {
    const double y = kBottom - axis.place(chart.line->value) * (kBottom - kTop - 12);
    grid_line(html, "limit", kLeft, y, right, y);
    label(html, "tick limit", right + 6, y + 4, chart.line->label);
  }
  name_labels(html, names, kLeft, step, kBottom + 18);
  label(html, "axis middle", (kLeft + right) / 2, kHeight - 6, chart.x_title);
}

void write_row_chart(Markup& html, const RowChart& chart) {
  constexpr double kRow = 20, kNumbers = 150, kWidest = 330;
  constexpr auto kNameWidth = static_cast<std::size_t>((kWidest - 10) / kFixedCharacter);
  std::vector<std::string> names;
  double largest = 0.0;
  for (const RowChart::Row& row : chart.rows) {
    names.push_back(row.name);
    if (row.value && std::isfinite(*row.value)) largest = std::max(largest, *row.value);
  }
  names = shortened_apart(names, kNameWidth);
  std::size_t longest = 0;
  for (const std::string& name : names) longest = std::max(longest, columns(name));
  const double left = static_cast<double>(longest) * kFixedCharacter + 10;
  const double room = kChartWidth - left - kNumbers;
  const Tag svg(html, "svg", svg_attributes(kRow * static_cast<double>(chart.rows.size()) + 4, chart.description));
  for (std::size_t i = 0; i < chart.rows.size(); ++i) {
    const RowChart::Row& row = chart.rows[i];
    const double y = static_cast<double>(i) * kRow;
    const bool finite = row.value && std::isfinite(*row.value);
    const double width = !row.value ? 0 : !finite ? room : largest > 0 ? std::max(0.0, *row.value / largest) * room : 0;
    const Tag line(html, "g", mark("mark", row.tip, row.find));
    rectangle(html, {{"class", "reach"}}, 0, y, kChartWidth, kRow);
    label(html, "name end", left - 10, y + 14, names[i]);
    rectangle(html,
              {{"class", !finite    ? "bar alarm"
                         : row.rest ? "bar rest"
                                    : "bar"}},
              left, y + 4, std::max(width, row.value ? 1.0 : 0.0), kRow - 8);
    label(html, "number end", kChartWidth - 70, y + 14, row.number);
    label(html, "number end", kChartWidth - 2, y + 14, row.share);
  }
}

void write_heat_map(Markup& html, const HeatMap& map) {
  constexpr double kRight = kChartWidth - 170, kRow = 24, kAxis = 44, kWidestLabels = 300;
  std::size_t longest = 0;
  for (const HeatMap::Row& row : map.rows) longest = std::max(longest, columns(row.label));
  const double left = std::min(static_cast<double>(longest) * kFixedCharacter + 12, kWidestLabels);
  const double bottom = kTop + kRow * static_cast<double>(map.rows.size());
  const double step = (kRight - left) / static_cast<double>(std::max<std::size_t>(map.columns.size(), 1));
  std::vector<double> everything;
  for (const HeatMap::Row& row : map.rows) {
    if (row.alarm) continue;
    for (const double value : finite_values(row.values)) everything.push_back(value);
  }
  const Tag svg(html, "svg", svg_attributes(bottom + kAxis, map.description));
  for (std::size_t r = 0; r < map.rows.size(); ++r) {
    const HeatMap::Row& row = map.rows[r];
    const ColourScale scale(map.common_scale ? everything : finite_values(row.values));
    const double y = kTop + kRow * static_cast<double>(r);
    label(html, "name end", left - 10, y + 16, fitting(row.label, kWidestLabels));
    for (std::size_t c = 0; c < row.values.size(); ++c) {
      std::string style = "mark cell none";
      if (row.values[c]) {
        const std::optional<std::size_t> found = scale.class_of(*row.values[c]);
        style = !found || (row.alarm && *row.values[c] > 0.0) ? "mark cell alarm"
                : row.alarm                                   ? "mark cell s0"
                            : fmt::format("mark cell s{}", std::max(*found, map.least_class));
      }
      rectangle(html, mark(style, row.tips[c], map.columns[c].find), left + static_cast<double>(c) * step, y + 1, step,
                kRow - 2);
    }
    if (!row.low.empty()) {
      label(html, "tick", kRight + 10, y + 16, row.low == row.high ? row.low : row.low + " to " + row.high);
    }
  }
  name_labels(html, map.columns, left, step, bottom + 18);
  label(html, "axis middle", (left + kRight) / 2, bottom + kAxis - 6, map.x_title);
}

namespace {

constexpr double kIcicleRow = 26;
constexpr double kLeastWidth = 3;  // of a node that is drawn by itself

std::size_t height_of(const IcicleNode& node) {
  std::size_t height = 0;
  for (const IcicleNode& child : node.children) height = std::max(height, height_of(child));
  return height + 1;
}

void write_node(Markup& html, const IcicleNode& node, double x, double width, std::size_t level) {
  const double y = static_cast<double>(level) * kIcicleRow;
  {
    const Tag group(html, "g", mark("mark " + node.style, node.tip, node.find));
    rectangle(html, {{"class", "node"}}, x, y, width, kIcicleRow - 1);
    const std::string text = fitting(node.label, width - 8);
    if (!text.empty()) label(html, "node-label", x + 4, y + 17, text);
  }
  double at = x;
  for (std::size_t i = 0; i < node.children.size();) {
    const IcicleNode& child = node.children[i];
    const double part = node.weight > 0.0 ? child.weight / node.weight * width : 0.0;
    if (part >= kLeastWidth) {
      write_node(html, child, at, part, level + 1);
      at += part;
      ++i;
      continue;
    }
    // Neighbours too narrow to be met are one mark.
    std::size_t few = 0;
    double together = 0.0;
    for (; i < node.children.size(); ++i, ++few) {
      const double next = node.weight > 0.0 ? node.children[i].weight / node.weight * width : 0.0;
      if (next >= kLeastWidth) break;
      together += next;
    }
    if (together >= 0.5) {
      rectangle(html,
                mark("mark node narrow",
                     fmt::format("{} in {}", few == 1 ? child.tip : fmt::format("{} small modules", few), node.label),
                     node.find),
                at, y + kIcicleRow, together, kIcicleRow - 1);
    }
    at += together;
  }
}

}  // namespace

void write_icicle(Markup& html, const Icicle& icicle) {
  const double height = static_cast<double>(height_of(icicle.root)) * kIcicleRow;
  const Tag svg(html, "svg", svg_attributes(height, icicle.description));
  write_node(html, icicle.root, 0, kChartWidth, 0);
}

void write_rank_grid(Markup& html, const RankGrid& grid) {
  constexpr double kCellHeight = 22, kGap = 3, kBlockGap = 14, kLeft = 96, kAbove = 18;
  const std::size_t dimensions = grid.shape.size();
  const auto columns_in_all = static_cast<std::size_t>(grid.shape[dimensions - 1]);
  const std::size_t rows = dimensions > 1 ? static_cast<std::size_t>(grid.shape[dimensions - 2]) : 1;
  const std::size_t blocks = grid.cells.size() / (columns_in_all * rows);
  const double width = std::clamp((kChartWidth - kLeft) / static_cast<double>(columns_in_all), 3.0, 64.0);
  const double block_height = static_cast<double>(rows) * kCellHeight + (blocks > 1 ? kBlockGap : 0);
  const bool labelled = width >= 24;

  const double all = std::min(kLeft + static_cast<double>(columns_in_all) * width, kChartWidth - 1);
  const Tag svg(html, "svg",
                svg_attributes(kAbove + static_cast<double>(blocks) * block_height + 4, grid.description, all));
  label(html, "tick", kLeft, 12, fitting(grid.dim_names[dimensions - 1], 200) + " →");
  for (std::size_t i = 0; i < grid.cells.size(); ++i) {
    const RankGrid::Cell& cell = grid.cells[i];
    const std::size_t column = i % columns_in_all;
    const std::size_t row = i / columns_in_all % rows;
    const std::size_t block = i / columns_in_all / rows;
    const double x = kLeft + static_cast<double>(column) * width;
    const double y = kAbove + static_cast<double>(block) * block_height + static_cast<double>(row) * kCellHeight;
    if (column == 0 && dimensions > 1) {
      std::string of_block;
      std::size_t rest = block;
      for (std::size_t d = dimensions - 2; d-- > 0;) {
        const auto extent = static_cast<std::size_t>(grid.shape[d]);
        of_block.insert(0, fmt::format("{} {} ", grid.dim_names[d], rest % extent));
        rest /= extent;
      }
      label(html, "tick end", kLeft - 8, y + 15,
            fitting(fmt::format("{}{} {}", row == 0 ? of_block : "", grid.dim_names[dimensions - 2], row), kLeft));
    }
    const Tag group(html, "g", mark("mark " + cell.style + (cell.alarm ? " found" : ""), cell.tip, ""));
    rectangle(html, {{"class", "rank"}}, x, y, width - (labelled ? kGap : 0.5), kCellHeight - kGap);
    if (labelled) label(html, "rank-label middle", x + (width - kGap) / 2, y + 14, cell.label);
  }
}

void write_exponent_chart(Markup& html, const ExponentChart& chart) {
  constexpr double kLeft = 84, kRight = kChartWidth - 8, kBottom = 220, kRange = 18;
  std::int64_t low = chart.first;
  std::int64_t high = chart.first + static_cast<std::int64_t>(chart.counts.size());  // one beyond the last
  // Room around, and one step of exponents for as many as a pixel has.
  low -= 2;
  high += 2;
  const double step = (kRight - kLeft) / static_cast<double>(high - low);
  const auto x_of = [&](std::int64_t exponent) {
    return kLeft + static_cast<double>(std::clamp(exponent, low, high) - low) * step;
  };
  std::vector<double> values;
  for (const std::uint64_t count : chart.counts) values.push_back(static_cast<double>(count));
  Axis axis{1.0, 10.0, true};
  for (const double value : values) {
    while (axis.high < value) axis.high *= 10.0;
  }

  const double height = kBottom + 44 + kRange * static_cast<double>(chart.ranges.size());
  const Tag svg(html, "svg", svg_attributes(height, chart.description));
  label(html, "axis", 0, 10, "elements, log scale");
  value_ticks(html, axis, kLeft, kRight, kTop + 12, kBottom);
  const double all = std::accumulate(values.begin(), values.end(), 0.0);
  for (std::size_t i = 0; i < chart.counts.size(); ++i) {
    const std::int64_t exponent = chart.first + static_cast<std::int64_t>(i);
    // A count of one stands on the axis's end and is still seen.
    const double bar = chart.counts[i] == 0 ? 0.0 : std::max(2.0, axis.place(values[i]) * (kBottom - kTop - 12));
    const Tag column(
        html, "g",
        mark("mark",
             fmt::format("{} ≤ |g| < {} ({} to {})\n{} elements, {:.3g} %", power_text(exponent),
                         power_text(exponent + 1), short_number(std::ldexp(1.0, static_cast<int>(exponent))),
                         short_number(std::ldexp(1.0, static_cast<int>(exponent + 1))), grouped(chart.counts[i]),
                         all > 0 ? 100 * values[i] / all : 0.0),
             ""));
    rectangle(html, {{"class", "reach"}}, x_of(exponent), kTop + 12, step, kBottom - kTop - 12);
    rectangle(html, {{"class", "bar"}}, x_of(exponent) + std::min(0.5, step / 4), kBottom - bar,
              step - std::min(1.0, step / 2), bar);
  }
  grid_line(html, "base", kLeft, kBottom, kRight, kBottom);
  const auto every = static_cast<std::int64_t>(std::max(1.0, std::ceil(40.0 / step)));
  const std::int64_t nice = every <= 2 ? every : every <= 5 ? 5 : every <= 10 ? 10 : (every + 19) / 20 * 20;
  for (std::int64_t e = low + 2; e < high - 1; ++e) {
    if (((e % nice) + nice) % nice == 0) label(html, "tick middle", x_of(e), kBottom + 16, power_text(e));
  }
  for (std::size_t i = 0; i < chart.ranges.size(); ++i) {
    const ExponentChart::Range& range = chart.ranges[i];
    const double y = kBottom + 26 + kRange * static_cast<double>(i);
    label(html, "tick end", kLeft - 6, y + 10, range.type);
    const double begin = x_of(range.subnormal), normal = x_of(range.normal), end = x_of(range.highest + 1);
    const std::string tip =
        fmt::format("{}\nnormal from {} to below {}\nsubnormal from {}", range.type, power_text(range.normal),
                    power_text(range.highest + 1), power_text(range.subnormal));
    rectangle(html, mark("mark range subnormal", tip, ""), begin, y + 2, std::max(0.0, normal - begin), 8);
    rectangle(html, mark("mark range", tip, ""), normal, y + 2, std::max(0.0, end - normal), 8);
  }
  label(html, "axis middle", (kLeft + kRight) / 2, height - 4,
        "binary exponent of |g|, and the ranges of element types");
}

}  // namespace gradclip
