#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <ostream>
#include <string_view>
#include <vector>

#include "gradclip/report/escapes.hpp"
#include "gradclip/report/structured.hpp"
#include "gradclip/report/text.hpp"

namespace gradclip {
namespace {

/// What CI systems list: one line that passed, failed, could not be tried (error) or was left out (skipped).
struct Case {
  enum class Verdict : std::uint8_t { passed, failed, error, skipped };
  std::string group;  ///< "gradclip.check"
  std::string name;
  Verdict verdict = Verdict::passed;
  std::string kind;     ///< of its first finding
  std::string message;  ///< one line
  std::string details;  ///< all findings, a line each
};

constexpr std::string_view kWhole = "(whole model)";

/// An update has written what it found: nothing of it is a failure.
bool updates(const CheckResult& check) {
  return check.outcome == CheckOutcome::updated || check.outcome == CheckOutcome::unchanged;
}

bool could_not_compare(const Finding& finding) {
  return finding.kind == "no-baseline" || finding.kind == "conditions-differ";
}

/// Made of a check's entry by finding_of().
bool is_of_an_entry(const Finding& finding) {
  constexpr std::string_view kKinds[] = {"missing", "extra", "shape", "dtype", "differs"};
  return std::find(std::begin(kKinds), std::end(kKinds), finding.kind) != std::end(kKinds);
}

std::string details_of(const Finding& finding) {
  std::string text = finding.kind;
  if (finding.index) text += fmt::format(" [{}]", fmt::join(*finding.index, ", "));
  if (!finding.ranks.empty()) text += fmt::format(" (ranks {})", rank_list(finding.ranks));
  return text + ": " + finding.message + '\n';
}

void add(Case& test, const Finding& finding) {
  if (test.kind.empty()) {
    test.verdict = could_not_compare(finding) ? Case::Verdict::error : Case::Verdict::failed;
    test.kind = finding.kind;
    test.message = finding.message;
  }
  test.details += details_of(finding);
}

/// Parameters in model order, as far as the command looked at each by itself.
std::vector<Case> parameters_of(const Report& report) {
  const std::string group = "gradclip." + report.command;
  std::vector<Case> cases;
  const auto add_parameter = [&](const std::string& name, bool compared) {
    Case& test = cases.emplace_back();
    test.group = group;
    test.name = name;
    if (compared) return;
    test.verdict = Case::Verdict::skipped;
    test.message = "not compared";
  };
  if (report.check) {
    for (const CheckedEntry& entry : report.check->entries) {
      add_parameter(entry.name.empty() ? std::string(kWhole) : entry.name, entry.compared);
      if (!updates(*report.check) && !entry.passed() && !entry.failed("nonfinite"))
        add(cases.back(), finding_of(entry));
    }
  } else if (report.diff) {
    for (const ReportDifference& parameter : report.diff->parameters) add_parameter(parameter.name, true);
  } else {
    for (const ReportParameter& parameter : report.parameters) add_parameter(parameter.name, true);
  }
  return cases;
}

/// Findings of the dump that a baseline knows are no failures; one that is gone asks for an update.
void add_known(const Report& report, std::vector<Case>& cases) {
  if (!report.check) return;
  for (const KnownFinding& known : report.check->known) {
    if (updates(*report.check) && !known.seen) continue;  // forgotten
    Case& test = cases.emplace_back();
    test.group = "gradclip.check.known";
    test.name = known.finding.kind + (known.finding.parameter.empty() ? "" : " " + known.finding.parameter);
    if (known.seen) continue;
    test.verdict = Case::Verdict::skipped;
    test.message = "the dump no longer has this finding: update the baseline";
  }
}

/// Every finding belongs to its parameter's case; those that concern the whole dump have one of their own.
std::vector<Case> cases_of(const Report& report) {
  std::vector<Case> cases = parameters_of(report);
  std::map<std::string, std::size_t> by_name;
  for (std::size_t i = cases.size(); i-- != 0;) by_name[cases[i].name] = i;
  add_known(report, cases);
  std::map<std::string, std::size_t> others;
  for (const Finding& finding : report.findings) {
    if (report.check && is_of_an_entry(finding)) continue;  // several entries may have one name: each has its own
    const auto place = by_name.find(finding.parameter);
    if (place != by_name.end()) {
      add(cases[place->second], finding);
      continue;
    }
    const std::string name = finding.kind + (finding.parameter.empty() ? "" : " " + finding.parameter);
    const auto [other, is_new] = others.try_emplace(name, cases.size());
    if (is_new) {
      Case& test = cases.emplace_back();
      test.group = fmt::format("gradclip.{}.findings", report.command);
      test.name = name;
    }
    add(cases[other->second], finding);
  }
  if (cases.empty()) cases.push_back({"gradclip." + report.command, "findings", Case::Verdict::passed, {}, {}, {}});
  return cases;
}

void write_case(const Case& test, std::ostream& out) {
  out << fmt::format("    <testcase classname=\"{}\" name=\"{}\"", xml_text(test.group), xml_text(test.name));
  switch (test.verdict) {
    case Case::Verdict::passed:
      out << "/>\n";
      return;
    case Case::Verdict::skipped:
      out << fmt::format("><skipped message=\"{}\"/></testcase>\n", xml_text(test.message));
      return;
    case Case::Verdict::failed:
    case Case::Verdict::error: {
      const std::string_view element = test.verdict == Case::Verdict::error ? "error" : "failure";
      out << fmt::format("><{} type=\"{}\" message=\"{}\">{}</{}></testcase>\n", element, xml_text(test.kind),
                         xml_text(test.message), xml_text(test.details), element);
      return;
    }
  }
}

void write_suite(const std::vector<Case>& cases, const std::string& title, double seconds, std::ostream& out) {
  const auto count = [&](Case::Verdict verdict) {
    return std::count_if(cases.begin(), cases.end(), [&](const Case& test) { return test.verdict == verdict; });
  };
  const std::string counts =
      fmt::format("tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.3f}\"", cases.size(),
                  count(Case::Verdict::failed), count(Case::Verdict::error), count(Case::Verdict::skipped), seconds);
  const std::string name = xml_text(title);
  out << "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
      << fmt::format("<testsuites name=\"{}\" {}>\n  <testsuite name=\"{}\" {}>\n", name, counts, name, counts);
  for (const Case& test : cases) write_case(test, out);
  out << "  </testsuite>\n</testsuites>\n";
}

}  // namespace

std::string junit_subject(const std::string& dump, const std::string& other) {
  return dump + " against " + other;
}

std::string junit_subject(std::size_t swept) {
  return fmt::format("--sweep of {} dumps", swept);
}

void write_junit(const Report& report, std::ostream& out) {
  const std::string subject = report.sweep   ? junit_subject(report.sweep->steps.size())
                              : report.diff  ? junit_subject(report.dump.path, report.diff->other.path)
                              : report.check ? junit_subject(report.dump.path, report.check->path)
                                             : report.dump.path;
  write_suite(cases_of(report), "gradclip " + report.command + " " + subject,
              report.run ? report.run->seconds_total : 0.0, out);
}

void write_junit_failure(const std::string& command, const std::string& subject, const std::string& kind,
                         const std::string& message, std::ostream& out) {
  write_suite({{"gradclip." + command, std::string(kWhole), Case::Verdict::error, kind, message, message + '\n'}},
              "gradclip " + command + " " + subject, 0.0, out);
}

}  // namespace gradclip
