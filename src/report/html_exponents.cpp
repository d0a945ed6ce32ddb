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

  void add(const PageHistogram& other) {
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

void write_layer_exponents(Markup& html, const PageReport& report) {
  const std::vector<Layer> layers = model_layers(report, kMostColumns);
  std::vector<Exponents> sums(layers.size());
  std::int64_t low = std::numeric_limits<std::int64_t>::max(), high = std::numeric_limits<std::int64_t>::min();
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (const std::size_t p : layers[l].parameters) {
      const PageParameter& parameter = report.parameters[p];
      if (parameter.counted && parameter.histogram) sums[l].add(*parameter.histogram);
    }
    if (sums[l].counts.empty()) continue;
    low = std::min(low, sums[l].first);
    high = std::max(high, sums[l].first + static_cast<std::int64_t>(sums[l].counts.size()) - 1);
  }
  if (low > high) return;
  HeatMap map;
  map.common_scale = true;
  map.least_class = 1;
  map.description = "Elements by binary exponent in each layer";
  map.x_title = "layers in model order";
  for (const Layer& layer : layers) {
    map.columns.push_back(chart_name(layer, report.parameters[layer.parameters.front()].name));
  }
  const auto together =
      (high - low + static_cast<std::int64_t>(kMostExponentRows)) / static_cast<std::int64_t>(kMostExponentRows);
  for (std::int64_t top = high; top >= low; top -= together) {
    const std::int64_t bottom = std::max(low, top - together + 1);
    HeatMap::Row& row = map.rows.emplace_back();
    row.label = power_text(top);
    if (top != bottom) row.label = power_text(bottom) + " to " + row.label;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      std::uint64_t all = 0, here = 0;
      for (std::size_t i = 0; i < sums[l].counts.size(); ++i) {
        const std::int64_t exponent = sums[l].first + static_cast<std::int64_t>(i);
        all += sums[l].counts[i];
        if (exponent >= bottom && exponent <= top) here += sums[l].counts[i];
      }
      const double part = all == 0 ? 0.0 : static_cast<double>(here) / static_cast<double>(all);
      row.values.push_back(here == 0 ? std::nullopt : std::optional(part));
      row.tips.push_back(
          fmt::format("{}\n{}: {} elements, {:.3g} %", layers[l].name, row.label, grouped(here), 100 * part));
    }
  }
  write_figure(html, "Exponents by layer",
               "The share of a layer's non-zero elements at each binary exponent. A layer that sits lower than its "
               "neighbours loses more when cast to a narrower type.",
               [&] {
                 write_heat_map(html, map);
                 write_legend(html, "few", "many", 's');
               });
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
}

}  // namespace gradclip
