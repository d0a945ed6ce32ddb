#include "failure_report.hpp"

#include <iostream>
#include <string_view>
#include <system_error>

#include "commands.hpp"
#include "github.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/report/annotations.hpp"
#include "gradclip/report/structured.hpp"
#include "output.hpp"

namespace gradclip {
namespace {

std::string_view kind_of(ExitCode code) {
  return code == ExitCode::bad_input ? "bad-input" : code == ExitCode::resources ? "resources" : "bug";
}

bool is_news(const Failure& failure) {
  const bool kind =
      failure.code == ExitCode::bad_input || failure.code == ExitCode::resources || failure.code == ExitCode::bug;
  return kind && !failure.told && !failure.silent;
}

/// Files that the command reads are no place for its report.
bool is_input(const std::filesystem::path& report, const CommandLine& line) {
  std::error_code error;
  const auto is = [&](const std::filesystem::path& file) {
    return !file.empty() && std::filesystem::equivalent(report, file, error);
  };
  return is(line.synth.model) || is(line.diff.map.value_or("")) || is(line.config);
}

/// The error may have come before the command looked at the path.
void check_paths(const Session& session, const CommandLine& line) {
  session.check_report_path(line.dump, line.output);
  if (line.command == Command::diff) session.check_report_path(line.diff.other, {});
  for (const std::filesystem::path& dump : line.more_dumps) session.check_report_path(dump, {});
  if (line.command == Command::check) refuse_baseline_as_report(line);
  if (!is_input(*line.common.report, line)) return;
  throw Error(ExitCode::usage, {.where = "--report " + gradclip::quoted(line.common.report->string()),
                                .found = "it is a file that the command reads",
                                .expected = "another file",
                                .advice = {}});
}

/// As the report of a run that ends well has it: CI systems know a suite by its name.
std::string subject_of(const CommandLine& line) {
  std::string dump = line.dump.string();
  if (!line.sweep.empty()) return junit_subject(line.more_dumps.size() + 1);
  if (line.command == Command::diff) return junit_subject(dump, line.diff.other.string());
  if (line.command == Command::check) return junit_subject(dump, line.check.baseline.string());
  if (line.checked) return junit_subject(shown_output(line), line.checked->string());
  return dump;
}

}  // namespace

void remove_older_report(const Session& session, const CommandLine& line) {
  if (!line.common.report) return;
  const std::filesystem::path& path = *line.common.report;
  check_paths(session, line);
  if (!session.speaks()) return;
  std::error_code error;
  const std::filesystem::path file = resolved_path(path, error);
  if (error || !std::filesystem::is_regular_file(file, error)) return;
  if (std::filesystem::remove(file, error) || !error) return;
  throw Error(ExitCode::resources, {.where = "report " + gradclip::quoted(path.string()),
                                    .found = "cannot remove the older one: " + error.message(),
                                    .expected = {},
                                    .advice = {}});
}

void report_failure(const Session& session, const CommandLine& line, const Failure& failure) noexcept {
  try {
    if (!is_news(failure) || !line.common.report) return;
    if (report_format(*line.common.report) != ReportFormat::junit) return;
    check_paths(session, line);
    write_whole_file(*line.common.report, [&](std::ostream& out) {
      write_junit_failure(std::string(name(line.command)), subject_of(line), std::string(kind_of(failure.code)),
                          failure.message, out);
    });
  } catch (...) {
    // The error itself is what matters, and it is told on stderr.
  }
}

void annotate_failure(const CommandLine& line, const Failure& failure, const Environment& environment) noexcept {
  try {
    if (line.command != Command::check || !is_news(failure) || !is_github(environment)) return;
    write_failure_annotation(std::string(name(line.command)), failure.message, std::cerr);
    std::cerr.flush();
  } catch (...) {
    // As above.
  }
}

}  // namespace gradclip
