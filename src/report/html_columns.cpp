#include "gradclip/report/html_columns.hpp"

#include <numeric>

#include "gradclip/report/text.hpp"

namespace gradclip {

std::vector<Layer> model_layers(const PageReport& report, std::size_t most) {
  return at_most(
      layers_by(report.parameters.size(), [&](std::size_t p) { return layer_of(report.parameters[p].name); }), most);
}

std::vector<Layer> compared_layers(const PageReport& report, std::size_t most) {
  return at_most(
      layers_by(report.differences.size(), [&](std::size_t p) { return layer_of(report.differences[p].name); }), most);
}

std::string merged_note(const std::vector<Layer>& layers) {
  const std::size_t all = std::accumulate(layers.begin(), layers.end(), std::size_t{0},
                                          [](std::size_t sum, const Layer& layer) { return sum + layer.layers; });
  if (all == layers.size()) return {};
  return fmt::format(" {} layers are drawn as {}, neighbours together.", grouped(all), layers.size());
}

std::string search_for(const std::string& module, const std::string& parameter) {
  return parameter.size() > module.size() ? module + '.' : module;
}

ChartName chart_name(const Layer& layer, const std::string& parameter) {
  if (layer.layers == 1) return {std::string(last_part(layer.name)), search_for(layer.name, parameter)};
  return {std::string(last_part(layer.name.substr(0, layer.name.find(" to ")))), {}};
}

void take_larger(std::optional<double>& largest, const std::optional<double>& value) {
  if (!value) return;
  if (!largest || std::isnan(*value) || *value > *largest) largest = value;
}

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

}  // namespace gradclip
