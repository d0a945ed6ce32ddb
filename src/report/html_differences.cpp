#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "gradclip/report/html_columns.hpp"
#include "gradclip/report/html_figures.hpp"
#include "gradclip/report/html_layers.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

struct DifferenceSum {
  std::size_t parameters = 0;
  std::size_t unequal = 0;
  std::optional<double> different;  ///< of all compared elements
  std::optional<double> max_abs;
  std::optional<double> max_rel;
  std::optional<double> relative_l2;  ///< the largest of its parameters, NaN where one is NaN or infinite on a side; so
                                      ///< are the next three
  std::optional<double> epsilons;
  std::optional<double> angle;  ///< 1 - cosine
  std::optional<double> ratio;  ///< |norm ratio - 1|
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Whether every pair that is not equal has a finite difference: no NaN or infinity meets another number.
bool is_finite(const PageDifference& parameter) {
  return parameter.nan_different == 0 && (!parameter.max_abs || std::isfinite(*parameter.max_abs));
}

DifferenceSum sum_of_differences(const PageReport& report, const std::vector<std::size_t>& parameters) {
  DifferenceSum sum;
  double elements = 0.0, different = 0.0;
  for (const std::size_t p : parameters) {
    const PageDifference& parameter = report.differences[p];
    ++sum.parameters;
    sum.unequal += parameter.status == "equal" ? 0 : 1;
    if (!parameter.elements) continue;
    elements += static_cast<double>(*parameter.elements);
    different += static_cast<double>(parameter.different);
    take_larger(sum.max_abs, parameter.max_abs);
    take_larger(sum.max_rel, parameter.max_rel);
    if (!is_finite(parameter)) {
      // The report's numbers are of the other elements, and may be those of two equal parameters.
      for (auto* error : {&sum.relative_l2, &sum.epsilons, &sum.angle, &sum.ratio}) take_larger(*error, kNan);
      continue;
    }
    take_larger(sum.relative_l2, parameter.relative_l2);
    take_larger(sum.epsilons, parameter.relative_l2_epsilons);
    if (parameter.cosine) take_larger(sum.angle, std::max(0.0, 1.0 - *parameter.cosine));
    if (parameter.norm_ratio) take_larger(sum.ratio, std::abs(*parameter.norm_ratio - 1.0));
  }
  if (elements > 0.0) sum.different = different / elements;
  return sum;
}

std::string difference_tip(const std::string& name, const DifferenceSum& sum) {
  std::string tip = fmt::format("{}\n{} of {} not equal", name, grouped(sum.unequal),
                                counted(sum.parameters, "parameter", "parameters"));
  if (sum.different) tip += fmt::format("\n{:.3g} % of the elements differ", 100.0 * *sum.different);
  if (sum.relative_l2) tip += "\nrelative L2 error up to " + short_number(*sum.relative_l2);
  if (sum.epsilons) tip += fmt::format(" ({} epsilons)", short_number(*sum.epsilons));
  if (sum.relative_l2 && std::isnan(*sum.relative_l2)) tip += "\na NaN or an infinity meets another number";
  if (sum.max_abs) tip += "\nlargest |a − b| " + short_number(*sum.max_abs);
  return tip;
}

struct DifferenceRow {
  std::string label;
  std::optional<double> DifferenceSum::*value;
  bool is_share = false;
  bool alarm = false;
};

}  // namespace

void write_difference_norms(Markup& html, const PageReport& report) {
  if (report.differences.empty()) return;
  const std::vector<Layer> layers = compared_layers(report, kMostBars);
  BarChart chart;
  chart.description = "Relative L2 error of each layer in model order";
  chart.x_title = "layers in model order";
  chart.y_title = "relative L2 error ‖A − B‖ / ‖B‖, in epsilons of the type";
  chart.line = BarChart::Line{1.0, "one epsilon"};
  for (const Layer& layer : layers) {
    const DifferenceSum sum = sum_of_differences(report, layer.parameters);
    chart.bars.push_back({chart_name(layer, report.differences[layer.parameters.front()].name), sum.epsilons,
                          difference_tip(layer.name, sum)});
  }
  write_figure(
      html, "Error by layer",
      "The largest of a layer's parameters; nan where a NaN or an infinity meets another number. About one epsilon is "
      "rounding; a layer where the error begins is where to look.",
      [&] { write_bar_chart(html, chart); });
}

void write_difference_statistics(Markup& html, const PageReport& report) {
  if (report.differences.empty()) return;
  const std::vector<Layer> layers = compared_layers(report, kMostColumns);
  const std::vector<DifferenceRow> rows{{"elements that differ", &DifferenceSum::different, true},
                                        {"largest |a − b|", &DifferenceSum::max_abs},
                                        {"largest |a − b| / |b|", &DifferenceSum::max_rel},
                                        {"relative L2 error", &DifferenceSum::relative_l2},
                                        {"1 − cosine", &DifferenceSum::angle},
                                        {"|‖A‖ / ‖B‖ − 1|", &DifferenceSum::ratio}};
  std::vector<DifferenceSum> sums;
  std::vector<std::string> names;
  std::vector<ChartName> columns;
  for (const Layer& layer : layers) {
    sums.push_back(sum_of_differences(report, layer.parameters));
    names.push_back(layer.name);
    columns.push_back(chart_name(layer, report.differences[layer.parameters.front()].name));
  }
  HeatMap map = statistics_map(
      rows, std::move(columns), names, [&](const DifferenceRow& row, std::size_t c) { return sums[c].*row.value; },
      [](const DifferenceRow& row, double value) { return row.is_share ? percentage(value) : short_number(value); });
  map.description = "How each layer differs, in model order";
  map.x_title = "layers in model order";
  write_figure(html, "Differences by layer",
               "The largest of a layer's parameters. Each row has its own scale, logarithmic where its values are far "
               "apart; an empty cell was not compared or has nothing that differs.",
               [&] {
                 write_heat_map(html, map);
                 write_legend(html, "smallest of the row", "largest", 's');
               });
}

}  // namespace gradclip
