#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/report/structured_pieces.hpp"
#include "gradclip/report/text_pieces.hpp"
#include "gradclip/report/text_table.hpp"

namespace gradclip {

using Layout = JsonWriter::Layout;

namespace {

/// Steps that are shown one by one; the JSON has all.
constexpr std::size_t kMostSteps = 20;

void write_steps(const ReportSweep& sweep, const TextStyle& style, std::ostream& out) {
  std::size_t step_width = 4;
  const auto step_text = [](const ReportSweepStep& step) { return step.step ? fmt::to_string(*step.step) : "-"; };
  for (const ReportSweepStep& step : sweep.steps) step_width = std::max(step_width, step_text(step).size());
  out << paint(style, Ink::faint, fmt::format("{:>{}}{:>24}  dump", "step", step_width, "total norm")) << '\n';
  const std::size_t shown = std::min(sweep.steps.size(), kMostSteps);
  for (std::size_t i = 0; i < shown; ++i) {
    const ReportSweepStep& step = sweep.steps[i];
    out << paint(style, std::isfinite(step.total) ? Ink::plain : Ink::alarm,
                 fmt::format("{:>{}}{:>24}  {}", step_text(step), step_width, step.total, printable(step.path)))
        << '\n';
  }
  if (sweep.steps.size() > shown) {
    out << fmt::format("... and {} more: --format json has all\n", grouped(sweep.steps.size() - shown));
  }
  out << '\n';
}

void write_lines(const ReportSweep& sweep, const TextStyle& style, std::ostream& out) {
  using Kind = TextTable::Kind;
  TextTable table;
  for (const auto& [label, width] :
       {std::pair("max norm", 12), std::pair("steps clipped", 15), std::pair("share", 10),
        std::pair("coefficient min", 17), std::pair("median", 12), std::pair("mean", 12)}) {
    table.column(label, Kind::number, width);
  }
  for (const SweepLine& line : sweep.lines) {
    const auto coefficient = [&](double number) { return line.steps == 0 ? "-" : fmt::format("{:.6g}", number); };
    table.row({fmt::format("{:.6g}", line.max_norm),
               fmt::format("{} of {}", grouped(line.clipped), grouped(line.steps)), part_text(line.clipped, line.steps),
               coefficient(line.least), coefficient(line.median), coefficient(line.mean)});
  }
  table.write(out, style);
  out << '\n';
}

}  // namespace

void write_sweep_tables(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportSweep& sweep = *report.sweep;
  out << paint(style, Ink::strong, "gradclip norms --sweep") << ' ' << counted(sweep.steps.size(), "step", "steps")
      << ", " << human_bytes(static_cast<double>(report.dump.bytes)) << " of gradients\n\n";
  write_steps(sweep, style, out);
  write_lines(sweep, style, out);
  if (sweep.nonfinite != 0) {
    line(out, style, "non-finite",
         fmt::format("the total of {}, which no line above counts", counted(sweep.nonfinite, "step", "steps")), {},
         Ink::alarm);
  }
}

void write_sweep(JsonWriter& json, const ReportSweep& sweep) {
  json.open_member("steps", '[', Layout::lines);
  for (const ReportSweepStep& step : sweep.steps) {
    json.open('{', Layout::one_line);
    json.member("path", step.path);
    json.member("step", step.step);
    json.member("type", step.type);
    json.member("total", step.total);
    json.member("findings", step.findings);
    json.close();
  }
  json.close();
  json.member("nonfinite_steps", sweep.nonfinite);
  json.open_member("sweep", '[', Layout::lines);
  for (const SweepLine& line : sweep.lines) {
    const auto if_any = [&](double coefficient) {
      return line.steps == 0 ? std::nullopt : std::optional<double>(coefficient);
    };
    json.open('{', Layout::one_line);
    json.member("max_norm", line.max_norm);
    json.member("clipped", line.clipped);
    json.member("steps", line.steps);
    json.open_member("coefficient", '{', Layout::one_line);
    json.member("min", if_any(line.least));
    json.member("median", if_any(line.median));
    json.member("mean", if_any(line.mean));
    json.close();
    json.close();
  }
  json.close();
}

void write_sweep_csv(const ReportSweep& sweep, std::ostream& out) {
  out << "max_norm,clipped,steps,coefficient_min,coefficient_median,coefficient_mean\n";
  for (const SweepLine& line : sweep.lines) {
    const auto if_any = [&](double coefficient) { return line.steps == 0 ? std::string() : csv_number(coefficient); };
    out << fmt::format("{},{},{},{},{},{}\n", csv_number(line.max_norm), line.clipped, line.steps, if_any(line.least),
                       if_any(line.median), if_any(line.mean));
  }
}

}  // namespace gradclip
