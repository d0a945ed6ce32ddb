#include "gradclip/report/annotations.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <ostream>

#include "gradclip/report/escapes.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {

void write_annotations(const Report& report, std::ostream& out) {
  if (report.findings.empty()) return;
  const std::string command = "gradclip " + report.command;
  const std::size_t shown = std::min(report.findings.size(), kMostAnnotations);
  for (std::size_t i = 0; i < shown; ++i) {
    const Finding& finding = report.findings[i];
    const std::string subject = finding.parameter.empty() ? "" : finding.parameter + ": ";
    out << fmt::format("::error title={}::{}\n", annotation_property(command + ": " + finding.kind),
                       annotation_text(subject + finding.message));
  }
  out << fmt::format("::error title={}::{}\n", annotation_property(command), annotation_text(check_summary(report)));
}

void write_failure_annotation(const std::string& command, const std::string& message, std::ostream& out) {
  out << fmt::format("::error title={}::{}\n", annotation_property("gradclip " + command), annotation_text(message));
}

void write_step_summary(const Report& report, std::ostream& out) {
  out << fmt::format("### gradclip {}: {}\n\n{}\n\n", report.command, name(report.check->outcome),
                     markdown_text(check_summary(report)));
  const std::vector<Finding>& findings = report.findings.empty() ? report.check->changes : report.findings;
  if (findings.empty()) return;
  out << "| kind | parameter | what |\n|---|---|---|\n";
  const std::size_t shown = std::min(findings.size(), kMostAnnotations);
  for (std::size_t i = 0; i < shown; ++i) {
    const Finding& finding = findings[i];
    out << fmt::format("| {} | {} | {} |\n", markdown_text(finding.kind),
                       finding.parameter.empty() ? "" : "<code>" + markdown_text(finding.parameter) + "</code>",
                       markdown_text(finding.message));
  }
  if (findings.size() > shown) out << fmt::format("\n... and {} more\n", grouped(findings.size() - shown));
  out << '\n';
}

}  // namespace gradclip
