#include "gradclip/report/html_figures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "gradclip/report/html_charts.hpp"
#include "gradclip/report/html_layers.hpp"
#include "gradclip/report/names.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostBars = 160;
constexpr std::size_t kMostColumns = 96;
constexpr std::size_t kMostRows = 24;
constexpr std::size_t kOutline = 6;
constexpr std::size_t kDeepest = 6;         // levels of the module tree that have a chart of their own
constexpr std::size_t kDeepestIcicle = 10;  // levels, before single children are put together
constexpr std::size_t kMostExponentRows = 40;

std::vector<Layer> model_layers(const PageReport& report, std::size_t most) {
  return at_most(
      layers_by(report.parameters.size(), [&](std::size_t p) { return layer_of(report.parameters[p].name); }), most);
}

/// What finds a module's parameters and not those of "layers.10" for "layers.1".
std::string search_for(const std::string& module, const std::string& parameter) {
  return parameter.size() > module.size() ? module + '.' : module;
}

ChartName chart_name(const Layer& layer, const std::string& parameter) {
  if (layer.layers == 1) return {std::string(last_part(layer.name)), search_for(layer.name, parameter)};
  return {std::string(last_part(layer.name.substr(0, layer.name.find(" to ")))), {}};
}

std::string norm_text(double p) {
  return std::isinf(p) ? "max norm" : fmt::format("{:g}-norm", p);
}

/// What a group of parameters is and holds, for its tooltip.
std::string tip_of(const std::string& name, const LayerSum& sum, const PageReport& report) {
  std::string tip = name;
  if (sum.norm) tip += fmt::format("\n{} {}", norm_text(report.norm_type.value_or(2.0)), short_number(*sum.norm));
  if (sum.share) tip += "\nshare " + percentage(*sum.share);
  if (sum.rms) tip += "\nroot mean square " + short_number(*sum.rms);
  tip +=
      fmt::format("\n{}, {} elements", counted(sum.parameters, "parameter", "parameters"), count_number(sum.elements));
  if (sum.nonfinite && *sum.nonfinite > 0) {
    tip += fmt::format("\n{} NaN or infinite", count_number(std::round(*sum.nonfinite * sum.elements)));
  }
  return tip;
}

std::string merged_note(std::size_t layers, std::size_t shown) {
  return layers > shown ? fmt::format(" {} layers are drawn as {}, neighbours together.", grouped(layers), shown) : "";
}

std::size_t layer_count(const PageReport& report) {
  return layers_by(report.parameters.size(), [&](std::size_t p) { return layer_of(report.parameters[p].name); }).size();
}

RowChart module_rows(const PageReport& report, std::vector<Layer> modules, std::size_t depth) {
  struct Line {
    Layer module;
    LayerSum sum;
  };
  std::vector<Line> lines;
  for (Layer& module : modules) {
    LayerSum sum = sum_of(report, module.parameters);
    lines.push_back({std::move(module), sum});
  }
  if (lines.size() > kMostRows) {
    // The largest stay, in model order; NaN is larger than any number.
    std::vector<double> sizes;
    const auto size_of_line = [](const Line& line) {
      const double norm = line.sum.norm.value_or(0.0);
      return std::isnan(norm) ? std::numeric_limits<double>::infinity() : norm;
    };
    for (const Line& line : lines) sizes.push_back(size_of_line(line));
    std::nth_element(sizes.begin(), sizes.begin() + kMostRows - 2, sizes.end(), std::greater<>());
    const double limit = sizes[kMostRows - 2];
    std::vector<Line> kept;
    Layer others{"", {}, 0};
    for (Line& line : lines) {
      if (kept.size() < kMostRows - 1 && size_of_line(line) >= limit) {
        kept.push_back(std::move(line));
        continue;
      }
      others.layers += 1;
      others.parameters.insert(others.parameters.end(), line.module.parameters.begin(), line.module.parameters.end());
    }
    const LayerSum sum = sum_of(report, others.parameters);
    others.name = fmt::format("({} smaller modules together)", grouped(others.layers));
    lines = std::move(kept);
    lines.push_back({std::move(others), sum});
  }
  RowChart chart;
  chart.description = fmt::format("Norm of each module at depth {}", depth);
  for (const Line& line : lines) {
    const std::string name = line.module.name.empty() ? "(root)" : line.module.name;
    const bool known = line.module.layers == 1 && !line.module.name.empty();
    chart.rows.push_back(
        {name, known ? search_for(line.module.name, report.parameters[line.module.parameters.front()].name) : "",
         line.sum.norm, line.sum.norm ? short_number(*line.sum.norm) : "not measured",
         line.sum.share && !std::isnan(*line.sum.share) ? percentage(*line.sum.share) : "",
         tip_of(name, line.sum, report), line.module.layers != 1});
  }
  return chart;
}

/// A class of colour by how an element of the module compares with one of the model.
std::string intensity_style(const LayerSum& sum, const LayerSum& whole) {
  if (sum.nonfinite && *sum.nonfinite > 0) return "alarm";
  if (!sum.rms || !whole.rms || *whole.rms == 0.0) return "d3";
  const double ratio = *sum.rms / *whole.rms;
  if (!std::isfinite(ratio)) return "d3";
  std::size_t place = 0;
  for (const double limit : {1.0 / 8, 1.0 / 3, 1.0 / 1.5, 1.5, 3.0, 8.0}) place += ratio > limit ? 1 : 0;
  return fmt::format("d{}", place);
}

IcicleNode icicle_node(const ModuleNode& module, const PageReport& report, const LayerSum& whole, bool by_share) {
  const LayerSum sum = sum_of(report, module.parameters);
  IcicleNode node;
  node.label = module.label;
  if (!module.name.empty()) node.find = search_for(module.name, report.parameters[module.parameters.front()].name);
  node.tip = tip_of(module.name.empty() ? "the whole model" : module.name, sum, report);
  if (sum.rms && whole.rms && *whole.rms > 0.0) {
    node.tip += fmt::format("\n{:.3g} × the model's", *sum.rms / *whole.rms);
  }
  node.weight = by_share ? sum.share.value_or(0.0) : sum.elements;
  node.style = intensity_style(sum, whole);
  for (const ModuleNode& child : module.children) node.children.push_back(icicle_node(child, report, whole, by_share));
  return node;
}

struct StatisticRow {
  std::string label;
  std::optional<double> LayerSum::*value;
  bool is_share = false;
  bool alarm = false;
};

/// Columns that are layers with rows that `value_of` and `text_of` give.
template <class Row, class Value, class Text>
HeatMap statistics_map(const std::vector<Row>& rows, std::vector<ChartName> columns,
                       const std::vector<std::string>& names, const Value& value_of, const Text& text_of) {
  HeatMap map;
  map.columns = std::move(columns);
  for (const Row& row : rows) {
    HeatMap::Row line;
    line.label = row.label;
    line.alarm = row.alarm;
    std::vector<double> finite;
    for (std::size_t c = 0; c < names.size(); ++c) {
      const std::optional<double> value = value_of(row, c);
      line.values.push_back(value);
      line.tips.push_back(
          fmt::format("{}\n{}: {}", names[c], row.label, value ? text_of(row, *value) : std::string("none")));
      if (value && std::isfinite(*value)) finite.push_back(*value);
    }
    if (!finite.empty()) {
      const ColourScale scale(finite);
      line.low = text_of(row, scale.low());
      line.high = text_of(row, scale.high());
      map.rows.push_back(std::move(line));
    }
  }
  return map;
}

void write_legend(Markup& html, std::string_view low, std::string_view high, char scale) {
  const Tag legend(html, "p", {{"class", "legend"}});
  html.text(low);
  {
    const Tag svg(html, "svg",
                  {{"viewBox", "0 0 140 12"}, {"width", "140"}, {"height", "12"}, {"aria-hidden", "true"}});
    for (std::size_t i = 0; i < kColourClasses; ++i) {
      html.empty("rect", {{"class", fmt::format("{}{}", scale, i)}, {"x", i * 20}, {"width", 20}, {"height", 12}});
    }
  }
  html.text(high);
}

// ---------------------------------------------------------------------------------------------------------------------
// Exponents
// ---------------------------------------------------------------------------------------------------------------------

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

void write_casts(Markup& html, const PageHistogram& all, std::uint64_t elements) {
  if (all.casts.empty()) return;
  const Tag scroll(html, "div", {{"class", "scroll"}, {"tabindex", "0"}, {"role", "region"}, {"aria-label", "casts"}});
  const Tag table(html, "table", {{"class", "plain"}});
  html.element("caption", {}, "What casting every element to a narrower type would do");
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
      const double part = elements > 0 ? static_cast<double>(number) / static_cast<double>(elements) : 0.0;
      html.element("td", {{"class", "n"}},
                   grouped(number) + (number == 0 ? "" : fmt::format(" ({})", percentage(part))));
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

void write_figure(Markup& html, std::string_view title, std::string_view explanation,
                  const std::function<void()>& content) {
  const Tag figure(html, "figure");
  {
    const Tag caption(html, "figcaption");
    html.element("h3", {}, title);
    if (!explanation.empty()) html.element("p", {}, explanation);
  }
  content();
  html.line();
}

void write_layer_norms(Markup& html, const PageReport& report) {
  if (!report.measured() || report.parameters.empty()) return;
  const std::vector<Layer> layers = model_layers(report, kMostBars);
  BarChart chart;
  chart.description = "Norm of each layer in model order";
  chart.x_title = "layers in model order";
  chart.y_title = norm_text(report.norm_type.value_or(2.0)) + " of the layer's gradients";
  for (const Layer& layer : layers) {
    const LayerSum sum = sum_of(report, layer.parameters);
    chart.bars.push_back({chart_name(layer, report.parameters[layer.parameters.front()].name), sum.norm,
                          tip_of(layer.name, sum, report)});
  }
  write_figure(html, "Norm by layer",
               "A layer is what stands up to the first number of a name; other modules stand for themselves." +
                   merged_note(layer_count(report), layers.size()),
               [&] { write_bar_chart(html, chart); });
}

void write_module_norms(Markup& html, const PageReport& report) {
  if (!report.measured() || report.parameters.empty()) return;
  struct Level {
    std::size_t depth;
    RowChart chart;
  };
  std::vector<Level> levels;
  std::size_t modules_before = 0;
  for (std::size_t depth = 1; depth <= kDeepest; ++depth) {
    std::vector<Layer> modules =
        layers_by(report.parameters.size(), [&](std::size_t p) { return module_of(report.parameters[p].name, depth); });
    if (modules.size() == modules_before) continue;  // nothing is deeper, or each module has a single one in it
    modules_before = modules.size();
    if (modules.size() == 1) continue;
    levels.push_back({depth, module_rows(report, std::move(modules), depth)});
  }
  if (levels.empty()) return;
  // The first that tells more than the model's outline.
  std::size_t shown = 0;
  while (shown + 1 < levels.size() && levels[shown].chart.rows.size() < kOutline) ++shown;
  write_figure(
      html, "Norm by module",
      fmt::format("Modules at a depth of the tree of names, in model order; the {} largest where there are more. "
                  "The p-th powers of a depth's norms add up to the total's.",
                  kMostRows - 1),
      [&] {
        {
          const Tag choices(html, "fieldset", {{"class", "choices"}});
          html.element("legend", {}, "Depth");
          for (std::size_t i = 0; i < levels.size(); ++i) {
            const Tag choice(html, "label");
            Attributes radio{{"type", "radio"}, {"name", "depth"}, {"value", levels[i].depth}};
            if (i == shown) radio.emplace_back("checked", "checked");
            html.empty("input", radio);
            html.text(fmt::format(" {}", levels[i].depth));
          }
        }
        for (const Level& level : levels) {
          const Tag part(html, "div", {{"data-choice", level.depth}});
          write_row_chart(html, level.chart);
        }
      });
}

void write_module_shares(Markup& html, const PageReport& report) {
  if (report.parameters.empty()) return;
  const bool by_share = report.measured() && std::isfinite(*report.total) && *report.total > 0.0 &&
                        std::isfinite(report.norm_type.value_or(2.0));
  const ModuleNode tree = module_tree(report.parameters, kDeepestIcicle);
  const LayerSum whole = sum_of(report, tree.parameters);
  Icicle icicle;
  icicle.description = by_share ? "Share of the total norm by module" : "Elements by module";
  icicle.root = icicle_node(tree, report, whole, by_share);
  if (!(icicle.root.weight > 0.0)) return;
  std::string explanation =
      by_share ? "A module's width is what it adds to the p-th power of the total norm; below it stand its parts."
               : "A module's width is its number of elements; below it stand its parts.";
  const bool has_scale = whole.rms && std::isfinite(*whole.rms);
  if (has_scale) explanation += " The colour compares the root mean square of its elements with the whole model's.";
  if (whole.nonfinite && *whole.nonfinite > 0) explanation += " What is red holds NaN or infinities.";
  write_figure(html, by_share ? "Share by module" : "Elements by module", explanation, [&] {
    write_icicle(html, icicle);
    if (has_scale) write_legend(html, "under 1/8 of the model's", "over 8 times", 'd');
  });
}

void write_layer_statistics(Markup& html, const PageReport& report) {
  if (!report.measured() || report.parameters.empty()) return;
  const std::vector<Layer> layers = model_layers(report, kMostColumns);
  const std::vector<StatisticRow> rows{{"norm", &LayerSum::norm},
                                       {"root mean square", &LayerSum::rms},
                                       {"share", &LayerSum::share, true},
                                       {"largest |g|", &LayerSum::max_abs},
                                       {"smallest |g| > 0", &LayerSum::min_abs},
                                       {"|mean|", &LayerSum::mean},
                                       {"zeros", &LayerSum::zeros, true},
                                       {"subnormal", &LayerSum::subnormals, true},
                                       {"NaN or infinite", &LayerSum::nonfinite, true, true}};
  std::vector<LayerSum> sums;
  std::vector<std::string> names;
  std::vector<ChartName> columns;
  for (const Layer& layer : layers) {
    sums.push_back(sum_of(report, layer.parameters));
    names.push_back(layer.name);
    columns.push_back(chart_name(layer, report.parameters[layer.parameters.front()].name));
  }
  HeatMap map = statistics_map(
      rows, std::move(columns), names, [&](const StatisticRow& row, std::size_t c) { return sums[c].*row.value; },
      [](const StatisticRow& row, double value) { return row.is_share ? percentage(value) : short_number(value); });
  map.description = "Statistics of each layer in model order";
  map.x_title = "layers in model order";
  write_figure(html, "Statistics by layer",
               "Each row has its own scale, from its smallest to its largest value; logarithmic where these are far "
               "apart." +
                   merged_note(layer_count(report), layers.size()),
               [&] {
                 write_heat_map(html, map);
                 write_legend(html, "smallest of the row", "largest", 's');
               });
}

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
        write_casts(html, all, report.all ? report.all->elements : 0);
      });
  write_layer_exponents(html, report);
}

// ---------------------------------------------------------------------------------------------------------------------
// Differences
// ---------------------------------------------------------------------------------------------------------------------

namespace {

struct DifferenceSum {
  std::size_t parameters = 0;
  std::size_t unequal = 0;
  std::optional<double> different;  ///< of all compared elements
  std::optional<double> max_abs;
  std::optional<double> max_rel;
  std::optional<double> relative_l2;  ///< the largest of its parameters; so are the next three
  std::optional<double> epsilons;
  std::optional<double> angle;  ///< 1 - cosine
  std::optional<double> ratio;  ///< |norm ratio - 1|
};

/// The larger; NaN is larger than any number.
void take_larger(std::optional<double>& largest, const std::optional<double>& value) {
  if (!value) return;
  if (!largest || std::isnan(*value) || *value > *largest) largest = value;
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
    take_larger(sum.relative_l2, parameter.relative_l2);
    take_larger(sum.epsilons, parameter.relative_l2_epsilons);
    if (parameter.cosine) take_larger(sum.angle, std::max(0.0, 1.0 - *parameter.cosine));
    if (parameter.norm_ratio) take_larger(sum.ratio, std::abs(*parameter.norm_ratio - 1.0));
  }
  if (elements > 0.0) sum.different = different / elements;
  return sum;
}

std::vector<Layer> compared_layers(const PageReport& report, std::size_t most) {
  return at_most(
      layers_by(report.differences.size(), [&](std::size_t p) { return layer_of(report.differences[p].name); }), most);
}

std::string difference_tip(const std::string& name, const DifferenceSum& sum) {
  std::string tip = fmt::format("{}\n{} of {} not equal", name, grouped(sum.unequal),
                                counted(sum.parameters, "parameter", "parameters"));
  if (sum.different) tip += fmt::format("\n{:.3g} % of the elements differ", 100.0 * *sum.different);
  if (sum.relative_l2) tip += "\nrelative L2 error up to " + short_number(*sum.relative_l2);
  if (sum.epsilons) tip += fmt::format(" ({} epsilons)", short_number(*sum.epsilons));
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
      "The largest of a layer's parameters, over the elements that are finite on both sides. About one epsilon "
      "is rounding; a layer where the error begins is where to look.",
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
