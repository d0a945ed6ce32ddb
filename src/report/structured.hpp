#pragma once
// Reports for programs: JSON, CSV and JUnit. Written as they are formed, so that a report of 100,000 parameters needs
// no second copy of itself. Numbers are the shortest decimals that read back to the same bits; NaN and infinities are
// the strings "nan", "inf", "-inf"; everything beyond ASCII is escaped in JSON, so that no name can write to a
// terminal.

#include <filesystem>
#include <iosfwd>

#include "gradclip/report/report.hpp"

namespace gradclip {

enum class ReportFormat : std::uint8_t { json, csv, junit, html };

/// The format that a file's ending asks for. .xml is JUnit. Errors: Error(usage) for any other ending.
[[nodiscard]] ReportFormat report_format(const std::filesystem::path& file);

/// The keys of docs/reports.md, in its order. What was not measured is null; what the command does not have is absent.
void write_json(const Report& report, std::ostream& out);
void write_json(const FactSheet& sheet, std::ostream& out);

/// The parameters (for `verify` the findings, for `check` the items, with a view its lines), one a line under a line of
/// column names (RFC 4180, lines end in \n). Text that a spreadsheet would take for a formula (it begins with = + - @,
/// a tab or a carriage return) begins with an apostrophe.
void write_csv(const Report& report, std::ostream& out);

void write_csv(const FactSheet& sheet, std::ostream& out);  ///< a line for each fact

/// Test results as CI systems read them: a suite of one case for each parameter that the command looked at, failed if a
/// finding names it, and one for each finding that names none of them. Names are escaped (escapes.hpp). The suite is
/// named by the command and by its subject: the dump, or what follows.
void write_junit(const Report& report, std::ostream& out);
[[nodiscard]] std::string junit_subject(const std::string& dump, const std::string& other);  ///< of a comparison
[[nodiscard]] std::string junit_subject(std::size_t swept);                                  ///< of so many dumps
/// Of a run that an error ended: one case, which could not be tried.
void write_junit_failure(const std::string& command, const std::string& subject, const std::string& kind,
                         const std::string& message, std::ostream& out);

void write(const Report& report, ReportFormat format, std::ostream& out);

}  // namespace gradclip
