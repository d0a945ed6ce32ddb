#pragma once
// What GitHub shows beside the log of a step: annotations, and a summary on the run's page.

#include <iosfwd>
#include <string>

#include "gradclip/report/report.hpp"

namespace gradclip {

/// GitHub shows ten annotations of a kind for a step: the worst nine findings, and one line for all.
inline constexpr std::size_t kMostAnnotations = 9;

/// Workflow commands, `::error title=...::...` a line: the worst findings and the total. Nothing where all passed.
void write_annotations(const Report& report, std::ostream& out);

/// One for a run that an error ended.
void write_failure_annotation(const std::string& command, const std::string& message, std::ostream& out);

/// The verdict and a table of the worst findings as markdown.
void write_step_summary(const Report& report, std::ostream& out);

}  // namespace gradclip
