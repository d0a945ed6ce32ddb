#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>

#include "gradclip/base/error.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"
#include "gradclip/report/text_table.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostRows = 20;
constexpr std::size_t kMostFindings = 10;
constexpr std::size_t kMostElementLines = 100;

std::size_t count(const ReportDiff& diff, std::string_view status) {
  return static_cast<std::size_t>(
      std::count_if(diff.parameters.begin(), diff.parameters.end(),
                    [&](const ReportDifference& parameter) { return parameter.status == status; }));
}

void write_verdict(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportDiff& diff = *report.diff;
  if (!diff.first) {
    const bool clean = report.findings.empty();
    out << paint(style, clean ? Ink::strong : Ink::warning,
                 fmt::format("equal{}: {}", clean ? "" : ", with findings",
                             counted(diff.parameters.size(), "parameter", "parameters")))
        << '\n';
    return;
  }
  std::vector<std::string> also;
  if (const std::size_t missing = count(diff, "missing")) also.push_back(fmt::format("{} missing", grouped(missing)));
  if (const std::size_t extra = count(diff, "extra")) also.push_back(fmt::format("{} extra", grouped(extra)));
  const ReportDifference& first = diff.parameters[*diff.first];
  const std::string others = comma_separated(also);
  out << paint(style, Ink::alarm,
               fmt::format("differs: {} of {}{}, first in model order {}{}", grouped(count(diff, "differs")),
                           counted(diff.parameters.size(), "parameter", "parameters"),
                           others.empty() ? "" : ", " + others, printable(first.name),
                           first.first_different ? " " + index_text(*first.first_different) : ""))
      << '\n';
}

void write_side(const char* side, const ReportDump& dump, const TextStyle& style, std::ostream& out) {
  std::string text = dump.step ? fmt::format("step {}, ", *dump.step) : "";
  text +=
      fmt::format("{}, {}, {}", counted(static_cast<std::uint64_t>(dump.world_size), "rank", "ranks"),
                  counted(dump.parameters, "parameter", "parameters"), counted(dump.elements, "element", "elements"));
  line(out, style, side, printable(dump.path), text);
}

/// Not the gradients, but what was recorded with them: often why they differ.
void write_notes(const ReportDiff& diff, const TextStyle& style, std::ostream& out) {
  std::vector<std::string> others;
  for (const ReportNote& note : diff.notes) {
    if (note.what == "state") {
      line(out, style, "note", fmt::format("A is {}, B is {}", value_text(note.a), value_text(note.b)),
           "what the step does between them is a difference", Ink::warning);
    } else {
      others.push_back(fmt::format("{} {} / {}", note.what, value_text(note.a), value_text(note.b)));
    }
  }
  if (!others.empty()) line(out, style, "note", "A / B: " + comma_separated(others));
}

std::string rule_text(const ReportDiff& diff) {
  std::string text;
  if (diff.ulps) {
    text = fmt::format("at most {} of the narrower type apart", counted(*diff.ulps, "ulp", "ulps"));
  } else {
    text = fmt::format("|a - b| <= {} + {} x |b|", diff.absolute.value_or(0.0),
                       diff.relative ? fmt::format("{}", *diff.relative) : "epsilon of the narrower type");
  }
  return text + (diff.equal_nan ? "; NaN equals NaN" : "; NaN equals nothing");
}

std::string number_text(const std::optional<ReportExtreme>& extreme) {
  return extreme ? fmt::format("{:.4g}", extreme->value) : "-";
}

std::string optional_text(const std::optional<double>& number) {
  return number ? fmt::format("{:.7g}", *number) : "-";
}

/// NaN and None first, then by relative error in the 2-norm: large and small parameters alike.
bool is_worse(const ReportDifference& x, const ReportDifference& y) {
  const bool x_broken = x.nan_different + x.none_different != 0, y_broken = y.nan_different + y.none_different != 0;
  if (x_broken != y_broken) return x_broken;
  return x.relative_l2 > y.relative_l2;
}

void write_table(const ReportDiff& diff, const TextStyle& style, std::ostream& out) {
  std::vector<const ReportDifference*> rows;
  for (const ReportDifference& parameter : diff.parameters) {
    if (parameter.elements && parameter.status == "differs") rows.push_back(&parameter);
  }
  if (rows.empty()) return;
  std::stable_sort(rows.begin(), rows.end(),
                   [](const ReportDifference* x, const ReportDifference* y) { return is_worse(*x, *y); });
  const std::size_t shown = std::min(rows.size(), kMostRows);
  using Kind = TextTable::Kind;
  TextTable table;
  table.column("name", Kind::text);
  table.column("differ", Kind::number);
  table.column("max abs", Kind::number, 11);
  table.column("max rel", Kind::number, 11, true);
  table.column("rel L2", Kind::number, 11);
  table.column("epsilons", Kind::number, 11, true);
  table.column("cosine", Kind::number, 12, true);
  table.column("|A|/|B|", Kind::number, 12, true);
  for (std::size_t i = 0; i < shown; ++i) {
    const ReportDifference& row = *rows[i];
    std::string different = fmt::format("{} of {}", grouped(row.different), grouped(*row.elements));
    if (row.nan_different != 0) different = fmt::format("{} NaN, {}", grouped(row.nan_different), different);
    table.row({printable(row.name), std::move(different), number_text(row.max_abs), number_text(row.max_rel),
               fmt::format("{:.4g}", row.relative_l2), fmt::format("{:.4g}", row.relative_l2_epsilons),
               optional_text(row.cosine), optional_text(row.norm_ratio)},
              row.nan_different != 0 ? Ink::alarm : Ink::plain);
  }
  out << '\n';
  table.write(out, style);
  if (std::any_of(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(shown),
                  [](const ReportDifference* row) { return row->nan_different != 0; })) {
    out << "where there is a NaN, rel L2 and what follows it are of the elements that are finite on both sides\n";
  }
  if (const std::string left_out = table.left_out(style); !left_out.empty()) {
    out << "left out, for want of columns: " << left_out << '\n';
  }
  if (rows.size() > shown) {
    out << fmt::format("... and {} more: --report FILE.json has all\n", grouped(rows.size() - shown));
  }
}

void write_worst(const ReportDiff& diff, const TextStyle& style, std::ostream& out) {
  std::size_t lines = 0, left_out = 0;
  for (const ReportDifference& parameter : diff.parameters) {
    if (parameter.worst.empty()) continue;
    if (lines >= kMostElementLines) {
      left_out += parameter.worst.size();
      continue;
    }
    out << '\n' << paint(style, Ink::strong, printable(parameter.name)) << '\n';
    for (const ReportElement& element : parameter.worst) {
      out << fmt::format("  {}  a = {}, b = {}, a - b = {:.6g}\n", index_text(element.index), element.a, element.b,
                         element.a - element.b);
      ++lines;
    }
  }
  if (left_out != 0) out << fmt::format("... and {} more elements: --report FILE.json has all\n", grouped(left_out));
}

void write_findings(const Report& report, const TextStyle& style, std::ostream& out) {
  if (report.findings.empty()) {
    line(out, style, "findings", "none");
    return;
  }
  line(out, style, "findings", grouped(report.findings.size()), {}, Ink::warning);
  // Copies that disagree and causes explain the rest: they are shown whatever comes before them.
  std::vector<const Finding*> order;
  for (const bool is_row : {false, true}) {
    for (const Finding& finding : report.findings) {
      if ((finding.kind == "differs") == is_row) order.push_back(&finding);
    }
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i == kMostFindings) {
      out << fmt::format("  ... and {} more: --report FILE.json has all\n", grouped(order.size() - i));
      break;
    }
    const Finding& finding = *order[i];
    out << "  " << paint(style, Ink::warning, printable(finding.kind));
    if (!finding.parameter.empty()) out << ' ' << printable(finding.parameter);
    if (finding.index) out << ' ' << index_text(*finding.index);
    if (!finding.ranks.empty()) out << " (" << ranks_text(finding.ranks) << ')';
    out << ": " << printable(finding.message) << '\n';
  }
}

}  // namespace

void write_differences(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportDiff& diff = *report.diff;
  write_verdict(report, style, out);
  out << '\n';
  write_side("A", report.dump, style, out);
  write_side("B", diff.other, style, out);
  if (diff.same_path) line(out, style, "", "A and B are the same directory", {}, Ink::warning);
  write_notes(diff, style, out);
  line(out, style, "equal if", rule_text(diff));
  write_findings(report, style, out);
  write_table(diff, style, out);
  write_worst(diff, style, out);
  const ReportRun& run = *report.run;
  const double bytes = static_cast<double>(report.dump.bytes) + static_cast<double>(diff.other.bytes);
  out << '\n';
  line(out, style, "time",
       fmt::format("{}, {}/s of both dumps", human_seconds(run.seconds_total),
                   human_bytes(run.seconds_total > 0.0 ? bytes / run.seconds_total : 0.0)));
  line(out, style, "processes",
       fmt::format("{} with {}{}, {} at most of {} a process", run.processes, counted(run.threads, "thread", "threads"),
                   run.processes > 1 ? " each" : "", human_bytes(static_cast<double>(run.memory_peak_bytes)),
                   human_bytes(static_cast<double>(run.memory_budget_bytes))));
}

}  // namespace gradclip
