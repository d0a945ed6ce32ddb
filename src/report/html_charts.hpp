#pragma once
// Charts as SVG: geometry only, of plain data that others put together. Inside this room. Marks carry their tooltip in
// data-tip and what a click looks for in the table in data-find; colours are classes of the page's style.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/report/html_axes.hpp"
#include "gradclip/report/html_markup.hpp"

namespace gradclip {

/// Pixels of every chart's view box from left to right.
inline constexpr double kChartWidth = 1080;

/// One thing on an axis of names.
struct ChartName {
  std::string label;  ///< short, under the axis
  std::string find;   ///< what its marks look for in the table; empty: nothing
};

/// Bars of one number each, in the given order.
struct BarChart {
  std::string description;  ///< for those who do not see it
  std::string x_title;
  std::string y_title;
  struct Bar {
    ChartName name;
    std::optional<double> value;  ///< NaN and infinite are drawn over the whole height as what they are
    std::string tip;
  };
  std::vector<Bar> bars;
  struct Line {
    double value;
    std::string label;
  };
  std::optional<Line> line;  ///< across all bars
};
void write_bar_chart(Markup& html, const BarChart& chart);

/// Rows of a name, a bar and its numbers.
struct RowChart {
  std::string description;
  struct Row {
    std::string name;
    std::string find;
    std::optional<double> value;
    std::string number;  ///< beside the bar; so is the next
    std::string share;
    std::string tip;
    bool rest = false;  ///< what is left together, not to be compared with the others
  };
  std::vector<Row> rows;
};
void write_row_chart(Markup& html, const RowChart& chart);

/// Rows of statistics over columns of layers; every row has its own scale of colour.
struct HeatMap {
  std::string description;
  std::string x_title;
  std::vector<ChartName> columns;
  struct Row {
    std::string label;
    std::vector<std::optional<double>> values;  ///< one per column; empty: nothing there
    std::vector<std::string> tips;              ///< one per column
    std::string low, high;                      ///< the ends of its scale
    bool alarm = false;                         ///< what is above 0 is an alarm, whatever the others are
  };
  std::vector<Row> rows;
  bool common_scale = false;
  std::size_t least_class = 0;  ///< of what has a value: above 0 where an empty cell has to look empty
};
void write_heat_map(Markup& html, const HeatMap& map);

/// Rectangles of a tree: a level a row, the width of a node its part of its parent's weight.
struct IcicleNode {
  std::string label;
  std::string find;
  std::string tip;
  double weight = 0.0;
  std::string style;  ///< css class of its colour
  std::vector<IcicleNode> children;
};
struct Icicle {
  std::string description;
  IcicleNode root;
};
/// @pre a node's weight is at least the sum of its children's, up to roundings
void write_icicle(Markup& html, const Icicle& icicle);

/// Ranks of a mesh as a grid: the last dimension from left to right, the one before it downwards, the others as blocks.
struct RankGrid {
  std::string description;
  std::vector<std::string> dim_names;
  std::vector<std::int64_t> shape;
  struct Cell {
    std::string label;
    std::string tip;
    std::string style;
    bool alarm = false;
  };
  std::vector<Cell> cells;  ///< row-major; as many as the shape says
};
/// The most cells that are worth drawing.
inline constexpr std::size_t kMostCells = 1024;
void write_rank_grid(Markup& html, const RankGrid& grid);

/// Counts by binary exponent over a logarithmic axis, with the ranges of element types under it.
struct ExponentChart {
  std::string description;
  std::int64_t first = 0;
  std::vector<std::uint64_t> counts;
  struct Range {
    std::string type;
    std::int64_t subnormal;  ///< exponent of the smallest subnormal
    std::int64_t normal;     ///< of the smallest normal
    std::int64_t highest;    ///< of the largest finite number
  };
  std::vector<Range> ranges;
};
void write_exponent_chart(Markup& html, const ExponentChart& chart);

}  // namespace gradclip
