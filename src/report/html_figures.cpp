#include "gradclip/report/html_figures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "gradclip/report/html_columns.hpp"
#include "gradclip/report/html_layers.hpp"
#include "gradclip/report/names.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostRows = 24;
constexpr std::size_t kOutline = 6;
constexpr std::size_t kDeepest = 6;         // levels of the module tree that have a chart of their own
constexpr std::size_t kDeepestIcicle = 10;  // levels, before single children are put together

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
         line.sum.norm, line.sum.norm ? short_number(*line.sum.norm) : "counted elsewhere",
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
  node.style = intensity_style(sum, whole);
  double parts = 0.0;
  for (const ModuleNode& child : module.children) {
    node.children.push_back(icicle_node(child, report, whole, by_share));
    parts += node.children.back().weight;
  }
  // A report may say anything: what is no weight has no width.
  const double own = by_share ? sum.share.value_or(0.0) : sum.elements;
  node.weight = std::max(std::isfinite(own) && own > 0.0 ? own : 0.0, parts);
  return node;
}

struct StatisticRow {
  std::string label;
  std::optional<double> LayerSum::*value;
  bool is_share = false;
  bool alarm = false;
};

}  // namespace

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
                   merged_note(layers),
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
  if (!(icicle.root.weight > 0.0) || std::isinf(icicle.root.weight)) return;
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
                   merged_note(layers),
               [&] {
                 write_heat_map(html, map);
                 write_legend(html, "smallest of the row", "largest", 's');
               });
}

// ---------------------------------------------------------------------------------------------------------------------
// Sweeps
// ---------------------------------------------------------------------------------------------------------------------

void write_steps(Markup& html, const PageReport& report) {
  if (report.steps.empty()) return;
  const std::size_t together = (report.steps.size() + kMostBars - 1) / kMostBars;
  BarChart chart;
  chart.description = "Total norm of each step";
  chart.x_title = "steps in the order of their recording";
  chart.y_title = "total norm";
  for (std::size_t begin = 0; begin < report.steps.size(); begin += together) {
    const std::size_t end = std::min(begin + together, report.steps.size());
    std::optional<double> largest;
    for (std::size_t i = begin; i < end; ++i) take_larger(largest, report.steps[i].total);
    const PageStep& first = report.steps[begin];
    std::string tip = first.path;
    if (first.step) tip += fmt::format("\nstep {}", *first.step);
    if (end - begin > 1) tip += fmt::format("\nand {} more", end - begin - 1);
    tip += fmt::format("\n{} {}", end - begin > 1 ? "largest total norm" : "total norm", exact_number(*largest));
    chart.bars.push_back({{fmt::to_string(first.step.value_or(static_cast<std::int64_t>(begin))), {}}, largest, tip});
  }
  write_figure(html, "Total norm by step", "", [&] { write_bar_chart(html, chart); });
}

void write_sweep(Markup& html, const PageReport& report) {
  if (report.sweep.empty()) return;
  BarChart chart;
  chart.description = "Share of the steps that each limit clips";
  chart.x_title = "max norm";
  chart.y_title = "part of the steps that would have been clipped, %";
  for (const PageSweepLine& line : report.sweep) {
    const double part =
        line.steps == 0 ? 0.0 : 100.0 * static_cast<double>(line.clipped) / static_cast<double>(line.steps);
    chart.bars.push_back({{short_number(line.max_norm), {}},
                          part,
                          fmt::format("max norm {}\n{} of {} clipped{}", exact_number(line.max_norm),
                                      grouped(line.clipped), counted(line.steps, "step", "steps"),
                                      line.median ? "\nmedian coefficient " + short_number(*line.median) : "")});
  }
  write_figure(html, "What each limit would have clipped", "", [&] { write_bar_chart(html, chart); });
}

}  // namespace gradclip
