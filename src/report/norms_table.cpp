#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <ostream>
#include <string_view>
#include <unordered_map>

#include "gradclip/base/error.hpp"
#include "gradclip/report/names.hpp"
#include "gradclip/report/text_pieces.hpp"
#include "gradclip/report/text_table.hpp"

namespace gradclip {
namespace {

/// Indices below `count` in the order that is asked for, the first `top` of them.
/// @param number  what the order compares, of an index: descending, NaN first, ties by index
/// @param text    the index's name
template <class Number, class Text>
std::vector<std::size_t> ordered(std::size_t count, const TableOptions& options, const Number& number,
                                 const Text& text) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const std::size_t rows = options.top == 0 ? count : std::min(options.top, count);
  const auto middle = order.begin() + static_cast<std::ptrdiff_t>(rows);
  switch (options.order) {
    case ParameterOrder::model:
      break;
    case ParameterOrder::name:
      std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return text(a) < text(b); });
      break;
    default:
      std::partial_sort(order.begin(), middle, order.end(), [&](std::size_t a, std::size_t b) {
        const double x = number(a), y = number(b);
        const bool x_nan = std::isnan(x), y_nan = std::isnan(y);
        if (x_nan != y_nan) return x_nan;
        if (!x_nan && x != y) return x > y;
        return a < b;
      });
  }
  order.resize(rows);
  return order;
}

double sort_key(ParameterOrder order, std::optional<double> norm, const ReportStatistics* statistics) {
  if (order == ParameterOrder::norm) return norm.value_or(-1.0);
  if (statistics == nullptr) return -1.0;
  return order == ParameterOrder::max ? statistics->max_abs : static_cast<double>(statistics->nonfinite());
}

using NonfiniteByName = std::unordered_map<std::string_view, double>;

/// NaN and infinities by parameter, those of copies that do not count too: no row's numbers have them.
NonfiniteByName found_nonfinite(const Report& report) {
  NonfiniteByName found;
  for (const Finding& finding : report.findings) {
    if (finding.kind == "nonfinite") found[finding.parameter] += finding.value.value_or(0.0);
  }
  return found;
}

std::vector<NormsRow> parameter_rows(const Report& report, const TableOptions& options) {
  std::vector<NormsRow> rows;
  for (const std::size_t index : ordered_parameters(report, options)) {
    const ReportParameter& parameter = report.parameters[index];
    if (!parameter.statistics) continue;
    rows.push_back({printable(parameter.name), parameter.norm.value_or(0.0),
                    parameter.counted ? parameter.share.value_or(0.0) : std::optional<double>(), &*parameter.statistics,
                    parameter.histogram ? &*parameter.histogram : nullptr});
  }
  return rows;
}

std::vector<NormsRow> view_rows(const ReportView& view, const TableOptions& options) {
  const std::vector<ReportViewLine>& lines = view.lines;
  const std::vector<std::size_t> order = ordered(
      lines.size(), options,
      [&](std::size_t i) { return sort_key(options.order, lines[i].norm, &lines[i].statistics); },
      [&](std::size_t i) -> const std::string& { return lines[i].name; });
  std::vector<NormsRow> rows;
  for (const std::size_t index : order) {
    const ReportViewLine& line = lines[index];
    std::string label = printable(line.name);
    if (view.by == ViewBy::module && label.empty()) label = "(root)";
    rows.push_back(
        {std::move(label), line.norm, line.share, &line.statistics, line.histogram ? &*line.histogram : nullptr});
  }
  return rows;
}

}  // namespace

std::vector<std::size_t> ordered_parameters(const Report& report, const TableOptions& options) {
  const std::vector<ReportParameter>& parameters = report.parameters;
  const NonfiniteByName found = options.order == ParameterOrder::nan ? found_nonfinite(report) : NonfiniteByName();
  return ordered(
      parameters.size(), options,
      [&](std::size_t i) {
        const ReportParameter& parameter = parameters[i];
        const double key =
            sort_key(options.order, parameter.norm, parameter.statistics ? &*parameter.statistics : nullptr);
        const auto more = found.find(parameter.name);
        return more == found.end() ? key : std::max(key, more->second);
      },
      [&](std::size_t i) -> const std::string& { return parameters[i].name; });
}

std::vector<NormsRow> norms_rows(const Report& report, const TableOptions& options) {
  return report.view ? view_rows(*report.view, options) : parameter_rows(report, options);
}

void write_norms_table(const Report& report, const TableOptions& options, const TextStyle& style, std::ostream& out) {
  const std::vector<NormsRow> rows = norms_rows(report, options);
  const std::string_view first_column = report.view ? name(report.view->by) : "name";
  const ReportStatistics total = report.norm->statistics.value_or(ReportStatistics{});

  constexpr std::size_t kNumber = 13;  // a space and "1.79769e+308" or "-1.7977e+308"
  constexpr std::size_t kShare = 9;    // a space and "100.00 %"
  constexpr std::size_t kNumbers = 3 * kNumber + kShare;
  // Rows too: a tied weight's later entry counts in no total.
  std::uint64_t zeros = total.zeros, nan = total.nan, inf = total.posinf + total.neginf;
  for (const NormsRow& row : rows) {
    zeros = std::max(zeros, row.statistics->zeros);
    nan = std::max(nan, row.statistics->nan);
    inf = std::max(inf, row.statistics->posinf + row.statistics->neginf);
  }
  const std::size_t zeros_width = std::max<std::size_t>(grouped(zeros).size(), 5) + 2;
  const std::size_t nan_width = std::max<std::size_t>(grouped(nan).size(), 3) + 2;
  const std::size_t inf_width = std::max<std::size_t>(grouped(inf).size(), 3) + 2;
  const std::size_t counts_width = zeros_width + nan_width + inf_width;
  std::size_t name_width = std::max<std::size_t>(5, first_column.size());
  for (const NormsRow& row : rows) name_width = std::max(name_width, columns(row.label));
  name_width = name_columns(style, name_width, kNumbers + counts_width);

  const auto text = [&](std::string_view label, double norm, std::optional<double> share,
                        const ReportStatistics& statistics) {
    return fmt::format("{}{:>{}.6g}{:>{}}{:>{}.6g}{:>{}}{:>{}}{:>{}}{:>{}}", left(label, name_width), norm, kNumber,
                       share ? percent(*share) : "tied", kShare, statistics.max_abs, kNumber,
                       statistics.elements != 0 ? fmt::format("{:.5g}", statistics.mean) : "-", kNumber,
                       grouped(statistics.zeros), zeros_width, grouped(statistics.nan), nan_width,
                       grouped(statistics.posinf + statistics.neginf), inf_width);
  };
  out << paint(style, Ink::faint,
               fmt::format("{}{:>{}}{:>{}}{:>{}}{:>{}}{:>{}}{:>{}}{:>{}}", left(first_column, name_width), "norm",
                           kNumber, "share", kShare, "max", kNumber, "mean", kNumber, "zeros", zeros_width, "nan",
                           nan_width, "inf", inf_width))
      << '\n';
  std::vector<std::string> labels;
  for (const NormsRow& row : rows) labels.push_back(row.label);
  labels = shortened_apart(labels, name_width);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const NormsRow& row = rows[i];
    out << paint(style, row.statistics->nonfinite() != 0 ? Ink::alarm : Ink::plain,
                 text(labels[i], row.norm, row.share, *row.statistics))
        << '\n';
  }
  const std::size_t all = report.view ? report.view->lines.size() : report.parameters.size();
  const std::size_t shown = options.top == 0 ? all : std::min(options.top, all);
  if (shown < all) {
    out << fmt::format("... {} of {} {}s shown\n", grouped(shown), grouped(all),
                       report.view ? name(report.view->by) : "parameter");
  }
  const bool finite = std::isfinite(report.norm->total);
  out << paint(style, Ink::strong,
               text("total", report.norm->total, finite ? (total.elements != 0 ? 1.0 : 0.0) : std::nan(""), total))
      << '\n';
  if (report.view && report.view->by == ViewBy::rank) {
    out << paint(style, Ink::faint, "copies count on one rank only: a rank's line is what counts there") << '\n';
  }
}

}  // namespace gradclip
