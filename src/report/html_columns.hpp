#pragma once
// Layers as the columns of charts, and what all figures have. Inside this room.

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradclip/report/html_charts.hpp"
#include "gradclip/report/html_data.hpp"
#include "gradclip/report/html_layers.hpp"

namespace gradclip {

constexpr std::size_t kMostBars = 160;
constexpr std::size_t kMostColumns = 96;

/// The model's layers, at most `most` of them.
[[nodiscard]] std::vector<Layer> model_layers(const PageReport& report, std::size_t most);
/// Those of what `diff` compared.
[[nodiscard]] std::vector<Layer> compared_layers(const PageReport& report, std::size_t most);
/// A sentence if neighbours were put together.
[[nodiscard]] std::string merged_note(const std::vector<Layer>& layers);

/// What finds a module's parameters, of which `parameter` is one, and not those of "layers.10" for "layers.1".
[[nodiscard]] std::string search_for(const std::string& module, const std::string& parameter);
/// @param parameter  the layer's first
[[nodiscard]] ChartName chart_name(const Layer& layer, const std::string& parameter);

/// The larger; NaN is larger than any number.
void take_larger(std::optional<double>& largest, const std::optional<double>& value);

void write_figure(Markup& html, std::string_view title, std::string_view explanation,
                  const std::function<void()>& content);
/// The classes of colour between two words. @param scale  's' or 'd'
void write_legend(Markup& html, std::string_view low, std::string_view high, char scale);

/// Columns with rows that `value_of` and `text_of` give; rows without any value are left out.
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
    std::optional<double> other;  // NaN or infinite
    for (std::size_t c = 0; c < names.size(); ++c) {
      const std::optional<double> value = value_of(row, c);
      line.values.push_back(value);
      line.tips.push_back(
          fmt::format("{}\n{}: {}", names[c], row.label, value ? text_of(row, *value) : std::string("none")));
      if (value && std::isfinite(*value)) {
        finite.push_back(*value);
      } else if (value) {
        other = value;
      }
    }
    if (!finite.empty()) {
      const ColourScale scale(finite);
      line.low = text_of(row, scale.low());
      line.high = text_of(row, scale.high());
    } else if (other) {
      line.low = line.high = text_of(row, *other);
    } else {
      continue;
    }
    map.rows.push_back(std::move(line));
  }
  return map;
}

}  // namespace gradclip
