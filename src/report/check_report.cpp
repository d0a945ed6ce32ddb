#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

std::string update_summary(const Report& report) {
  const CheckResult& check = *report.check;
  const std::string file = printable(check.path);
  if (!check.recorded) {
    return fmt::format(
        "baseline {} written, a new one: {}{}", file, counted(report.dump.parameters, "parameter", "parameters"),
        check.changes.empty() ? "" : ", " + counted(check.changes.size(), "known finding", "known findings"));
  }
  std::size_t added = 0, gone = 0, changed = 0;
  for (const Finding& change : check.changes) {
    added += change.kind == "extra" ? 1 : 0;
    gone += change.kind == "missing" ? 1 : 0;
    const bool is_entry = change.kind == "differs" || change.kind == "shape" || change.kind == "dtype";
    changed += is_entry && !change.parameter.empty() ? 1 : 0;
  }
  return fmt::format("baseline {} written: of {} {} changed, {} new, {} gone", file,
                     counted(report.dump.parameters, "parameter", "parameters"), grouped(changed), grouped(added),
                     grouped(gone));
}

/// Whether NaN or infinities are all that stands against a baseline.
bool is_nonfinite(const Report& report) {
  return !has_kind(report.findings, "nothing-seen");
}

}  // namespace

CheckCounts count_items(const CheckResult& check) {
  CheckCounts counts;
  for (const CheckedEntry& entry : check.entries) {
    for (const CheckItem& item : entry.items) {
      ++(item.status == CheckStatus::passed ? counts.items_passed : counts.items_failed);
    }
    if (entry.name.empty()) continue;
    ++(entry.passed() ? counts.parameters_passed : counts.parameters_failed);
  }
  return counts;
}

std::string check_summary(const Report& report) {
  const CheckResult& check = *report.check;
  const CheckCounts counts = count_items(check);
  std::string text = fmt::format("gradclip check: {}", name(check.outcome));
  switch (check.outcome) {
    case CheckOutcome::passed: {
      const auto known = static_cast<std::uint64_t>(
          std::count_if(check.known.begin(), check.known.end(), [](const KnownFinding& k) { return k.seen; }));
      text += fmt::format(": {} of {} fit {}", counted(counts.items_passed, "item", "items"),
                          counted(counts.parameters_passed, "parameter", "parameters"), printable(check.path));
      if (known != 0) text += ", " + counted(known, "known finding", "known findings");
      return text;
    }
    case CheckOutcome::no_baseline:
      return text + fmt::format(": {} does not exist; --update writes it from this dump", printable(check.path));
    case CheckOutcome::updated:
      return text + ": " + update_summary(report);
    case CheckOutcome::unchanged:
      return text + fmt::format(": {} says the same already and was not written", printable(check.path));
    case CheckOutcome::regressed:
    case CheckOutcome::conditions_differ:
      break;
  }
  text += ": " + counted(report.findings.size(), "finding", "findings");
  if (counts.items_failed != 0) {
    text += fmt::format(", {} of {} in {} of {}", grouped(counts.items_failed),
                        counted(counts.items_failed + counts.items_passed, "item", "items"),
                        grouped(counts.parameters_failed),
                        counted(counts.parameters_failed + counts.parameters_passed, "parameter", "parameters"));
  }
  if (check.update_refused) {
    text += fmt::format("; not updated: {} was not written{}", printable(check.path),
                        is_nonfinite(report) ? ", --allow-nonfinite records what is not finite" : "");
  }
  const Finding& worst = report.findings.front();
  return text + fmt::format("; worst: {}{}: {}", printable(worst.kind),
                            worst.parameter.empty() ? "" : " " + printable(worst.parameter), printable(worst.message));
}

Report check_report(const std::filesystem::path& dump, const Manifest& manifest, const TrainingStep& step,
                    const ClipOptions& options, const ClipResult& result, CheckResult check, ReportRun run) {
  Report report = clip_report("check", dump, manifest, step, options, result, std::nullopt, std::move(run));
  report.findings = check.findings;
  report.check = std::move(check);
  return report;
}

}  // namespace gradclip
