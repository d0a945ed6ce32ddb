#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "gradclip/report/html_columns.hpp"
#include "gradclip/report/html_figures.hpp"
#include "gradclip/report/html_layers.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostExponentRows = 40;

/// Counts by exponent of several parameters.
struct Exponents {
  std::int64_t first = 0;
  std::vector<std::uint64_t> counts;
  std::uint64_t nonfinite = 0;

  /// Other than 0.
  [[nodiscard]] std::uint64_t elements() const { return std::accumulate(counts.begin(), counts.end(), nonfinite); }
  [[nodiscard]] std::uint64_t between(std::int64_t bottom, std::int64_t top) const {
    std::uint64_t here = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const std::int64_t exponent = first + static_cast<std::int64_t>(i);
      if (exponent >= bottom && exponent <= top) here += counts[i];
    }
    return here;
  }

  void add(const PageHistogram& other) {
    nonfinite += other.nonfinite;
    if (other.counts.empty()) return;
    if (counts.empty()) {
      first = other.first;
      counts = other.counts;
      return;
    }
    if (other.first < first) {
      counts.insert(counts.begin(), static_cast<std::size_t>(first - other.first), 0);
      first = other.first;
    }
    const auto shift = static_cast<std::size_t>(other.first - first);
    counts.resize(std::max(counts.size(), shift + other.counts.size()));
    for (std::size_t i = 0; i < other.counts.size(); ++i) counts[shift + i] += other.counts[i];
  }
};

void write_casts(Markup& html, const PageHistogram& all) {
  if (all.casts.empty()) return;
  // Finite and not 0: which alone a cast changes in kind.
  const std::uint64_t elements = std::accumulate(all.counts.begin(), all.counts.end(), std::uint64_t{0});
  const Tag scroll(html, "div", {{"class", "scroll"}, {"tabindex", "0"}, {"role", "region"}, {"aria-label", "casts"}});
  const Tag table(html, "table", {{"class", "plain"}});
  html.element("caption", {}, "What casting to a narrower type would do to the elements that are finite and not 0");
  {
    const Tag head(html, "thead");
    const Tag row(html, "tr");
    html.element("th", {{"scope", "col"}}, "type");
    for (const auto& [what, number] : all.casts.front().counts)
      html.element("th", {{"scope", "col"}, {"class", "n"}}, what);
  }
  const Tag body(html, "tbody");
  for (const PageCast& cast : all.casts) {
    const Tag row(html, "tr");
    html.element("th", {{"scope", "row"}}, cast.type);
    for (const auto& [what, number] : cast.counts) {
      html.element("td", {{"class", "n"}},
                   grouped(number) + (number == 0 ? "" : fmt::format(" ({})", part_text(number, elements))));
    }
  }
}

/// What a figure says about whose exponents it shows.
struct ExponentFigure {
  std::string title;
  std::string explanation;
  std::string description;
  std::string x_title;
};

/// The share that `count_of` gives of each column's elements, as a row.
template <class Count>
HeatMap::Row share_row(std::string label, const std::vector<Layer>& columns, const std::vector<Exponents>& sums,
                       const Count& count_of) {
  HeatMap::Row row;
  row.label = std::move(label);
  for (std::size_t c = 0; c < columns.size(); ++c) {
    const std::uint64_t all = sums[c].elements(), here = count_of(sums[c]);
    const double part = all == 0 ? 0.0 : static_cast<double>(here) / static_cast<double>(all);
    row.values.push_back(here == 0 ? std::nullopt : std::optional(part));
    row.tips.push_back(
        fmt::format("{}\n{}: {} elements, {:.3g} %", columns[c].name, row.label, grouped(here), 100 * part));
  }
  return row;
}

void write_exponent_map(Markup& html, const ExponentFigure& figure, const std::vector<Layer>& columns,
                        std::vector<ChartName> names, const std::vector<Exponents>& sums) {
  std::int64_t low = std::numeric_limits<std::int64_t>::max(), high = std::numeric_limits<std::int64_t>::min();
  bool finite_alone = true;
  for (const Exponents& sum : sums) {
    finite_alone = finite_alone && sum.nonfinite == 0;
    if (sum.counts.empty()) continue;
    low = std::min(low, sum.first);
    high = std::max(high, sum.first + static_cast<std::int64_t>(sum.counts.size()) - 1);
  }
  if (low > high) return;
  HeatMap map;
  map.common_scale = true;
  map.least_class = 1;
  map.description = figure.description;
  map.x_title = figure.x_title;
  map.columns = std::move(names);
  if (!finite_alone) {
    map.rows.push_back(share_row("NaN or infinite", columns, sums, [](const Exponents& sum) { return sum.nonfinite; }));
    map.rows.back().alarm = true;
  }
  const auto together =
      (high - low + static_cast<std::int64_t>(kMostExponentRows)) / static_cast<std::int64_t>(kMostExponentRows);
  for (std::int64_t top = high; top >= low; top -= together) {
    const std::int64_t bottom = std::max(low, top - together + 1);
    std::string label = power_text(top);
    if (top != bottom) label.insert(0, power_text(bottom) + " to ");
    map.rows.push_back(
        share_row(std::move(label), columns, sums, [&](const Exponents& sum) { return sum.between(bottom, top); }));
  }
  write_figure(html, figure.title, figure.explanation, [&] {
    write_heat_map(html, map);
    write_legend(html, "few", "many", 's');
  });
}

void write_layer_exponents(Markup& html, const PageReport& report) {
  const std::vector<Layer> layers = model_layers(report, kMostColumns);
  std::vector<Exponents> sums(layers.size());
  std::vector<ChartName> names;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (const std::size_t p : layers[l].parameters) {
      const PageParameter& parameter = report.parameters[p];
      if (parameter.counted && parameter.histogram) sums[l].add(*parameter.histogram);
    }
    names.push_back(chart_name(layers[l], report.parameters[layers[l].parameters.front()].name));
  }
  write_exponent_map(html,
                     {"Exponents by layer",
                      "The share of a layer's elements other than 0 at each binary exponent. A layer that sits lower "
                      "than its neighbours loses more when cast to a narrower type.",
                      "Elements by binary exponent in each layer", "layers in model order"},
                     layers, std::move(names), sums);
}

/// Of the lines of a view, in its order.
void write_view_exponents(Markup& html, const PageParts& view) {
  const auto has_histogram = [](const PagePart& part) { return part.histogram.has_value(); };
  if (std::none_of(view.parts.begin(), view.parts.end(), has_histogram)) return;
  std::vector<Layer> lines;
  for (std::size_t i = 0; i < view.parts.size(); ++i) lines.push_back({view.parts[i].name, {i}, 1});
  lines = at_most(std::move(lines), kMostColumns);
  std::vector<Exponents> sums(lines.size());
  std::vector<ChartName> names;
  for (std::size_t l = 0; l < lines.size(); ++l) {
    for (const std::size_t part : lines[l].parameters) {
      if (view.parts[part].histogram) sums[l].add(*view.parts[part].histogram);
    }
    names.push_back({lines[l].name, {}});
  }
  write_exponent_map(html,
                     {fmt::format("Exponents by {}", view.title),
                      fmt::format("The share of a {}'s elements other than 0 at each binary exponent.", view.title) +
                          merged_note(lines),
                      fmt::format("Elements by binary exponent in each {}", view.title), "lines of the view"},
                     lines, std::move(names), sums);
}

}  // namespace

void write_exponents(Markup& html, const PageReport& report) {
  Exponents sum;
  PageHistogram all;
  if (report.all && report.all->histogram) {
    all = *report.all->histogram;
    sum.add(all);
  } else {
    for (const PageParameter& parameter : report.parameters) {
      if (parameter.counted && parameter.histogram) sum.add(*parameter.histogram);
    }
  }
  if (sum.counts.empty()) return;
  ExponentChart chart;
  chart.description = "Elements by binary exponent";
  chart.first = sum.first;
  chart.counts = sum.counts;
  // Exponents of the smallest subnormal, the smallest normal and the largest finite number.
  chart.ranges = {
      {"float16", -24, -14, 15}, {"bfloat16", -133, -126, 127}, {"e4m3", -9, -6, 8}, {"e5m2", -16, -14, 15}};
  write_figure(
      html, "Exponents of all elements",
      fmt::format("Elements by the power of two below their magnitude; {} zeros are not drawn.", grouped(all.zeros)),
      [&] {
        write_exponent_chart(html, chart);
        write_casts(html, all);
      });
  write_layer_exponents(html, report);
  if (!report.parts.empty()) write_view_exponents(html, report.parts.front());
}

}  // namespace gradclip
