#include <fmt/format.h>

#include <algorithm>
#include <ostream>

#include "gradclip/base/error.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostFindings = 20;

Ink ink_of(CheckOutcome outcome) {
  switch (outcome) {
    case CheckOutcome::passed:
    case CheckOutcome::updated:
    case CheckOutcome::unchanged:
      return Ink::strong;
    case CheckOutcome::no_baseline:
    case CheckOutcome::conditions_differ:
      return Ink::warning;
    case CheckOutcome::regressed:
      return Ink::alarm;
  }
  return Ink::alarm;
}

std::string scale_text(const BaselineConditions& conditions) {
  std::string text = fmt::format("p = {}, {} arithmetic", conditions.norm_type, printable(conditions.numerics));
  if (conditions.label_token_divisor) text += fmt::format(", all / {:.9g}", *conditions.label_token_divisor);
  if (conditions.expert_divisor) text += fmt::format(", experts / {:.9g}", *conditions.expert_divisor);
  return text;
}

void write_baseline_lines(const Report& report, const TextStyle& style, std::ostream& out) {
  const CheckResult& check = *report.check;
  std::string remark;
  if (check.tolerance) {
    remark = fmt::format("rtol {}, atol {}", check.tolerance->relative, check.tolerance->absolute);
    if (check.tolerance->zeros != 0.0) remark += fmt::format(", zeros_rtol {}", check.tolerance->zeros);
    if (check.recorded_step) remark = fmt::format("step {}, ", *check.recorded_step) + remark;
  } else if (check.outcome == CheckOutcome::regressed) {
    remark = "not looked at: non-finite values, or none at all, are refused before it";
  }
  line(out, style, "baseline", printable(check.path), remark);
  line(out, style, "measured", scale_text(check.conditions));
  if (check.recorded && check.outcome == CheckOutcome::conditions_differ) {
    line(out, style, "recorded", scale_text(*check.recorded), "nothing was compared", Ink::warning);
  }
  for (const std::string& pattern : check.unused_patterns) {
    line(out, style, "", "tolerance for " + quoted(pattern), "applies to no parameter", Ink::warning);
  }
}

/// A name never begins a line: "::add-mask::" would be a command to a CI system that reads the log.
void write_list(std::string_view label, const std::vector<Finding>& findings, Ink ink, const TextStyle& style,
                std::ostream& out) {
  if (findings.empty()) {
    line(out, style, label, "none");
    return;
  }
  line(out, style, label, grouped(findings.size()) + (findings.size() > 1 ? ", worst first" : ""), {}, ink);
  const std::size_t shown = std::min(findings.size(), kMostFindings);
  for (std::size_t i = 0; i < shown; ++i) {
    const Finding& finding = findings[i];
    out << "  " << paint(style, Ink::warning, printable(finding.kind));
    if (!finding.parameter.empty()) out << ' ' << printable(finding.parameter);
    if (finding.index) out << ' ' << index_text(*finding.index);
    if (!finding.ranks.empty()) out << " (" << ranks_text(finding.ranks) << ')';
    out << ": " << printable(finding.message) << '\n';
  }
  if (findings.size() > shown) {
    out << fmt::format("  ... and {} more: --report FILE.json has all\n", grouped(findings.size() - shown));
  }
}

void write_known(const CheckResult& check, const TextStyle& style, std::ostream& out) {
  if (check.known.empty()) return;
  line(out, style, "known", counted(check.known.size(), "finding", "findings"), "in the baseline: no news");
  std::size_t shown = 0;
  for (const KnownFinding& known : check.known) {
    if (shown++ == kMostFindings) {
      out << fmt::format("  ... and {} more: --report FILE.json has all\n",
                         grouped(check.known.size() - kMostFindings));
      break;
    }
    out << "  " << printable(known.finding.kind);
    if (!known.finding.parameter.empty()) out << ' ' << printable(known.finding.parameter);
    out << (known.seen ? "\n" : ": the dump no longer has it, --update forgets it\n");
  }
}

}  // namespace

void write_check(const Report& report, const TextStyle& style, std::ostream& out) {
  const CheckResult& check = *report.check;
  const bool updates = check.outcome == CheckOutcome::updated || check.outcome == CheckOutcome::unchanged;
  out << paint(style, ink_of(check.outcome), check_summary(report)) << "\n\n";
  std::string dump = report.dump.step ? fmt::format("step {}, ", *report.dump.step) : "";
  dump += fmt::format("{}, {}", counted(static_cast<std::uint64_t>(report.dump.world_size), "rank", "ranks"),
                      counted(report.dump.parameters, "parameter", "parameters"));
  line(out, style, "dump", printable(report.dump.path), dump);
  write_baseline_lines(report, style, out);
  line(out, style, "total norm", fmt::format("{}", report.norm->total));
  if (updates && !check.recorded && check.changes.empty()) {
    line(out, style, "changes", "a new baseline");
  } else if (updates) {
    write_list("changes", check.changes, Ink::warning, style, out);
  } else {
    write_list("findings", report.findings, Ink::alarm, style, out);
  }
  write_known(check, style, out);
  const ReportRun& run = *report.run;
  out << '\n';
  line(out, style, "time",
       fmt::format("{}, {} with {}{}", human_seconds(run.seconds_total),
                   counted(static_cast<std::uint64_t>(run.processes), "process", "processes"),
                   counted(run.threads, "thread", "threads"), run.processes > 1 ? " each" : ""));
}

}  // namespace gradclip
