#pragma once
// What a run that an error ended leaves for those who read its files instead of its exit code.

#include "failure.hpp"
#include "options.hpp"
#include "session.hpp"

namespace gradclip {

/// Before the work: removes what --report is to become, so that nobody takes an older file for this run's, however this
/// one ends. Pipes and devices stay. Errors: Error(usage) for a path that must not be written; Error(resources).
void remove_older_report(const Session& session, const CommandLine& line);

/// Where --report is JUnit, puts the error into it. Nothing for a command line that is wrong, a path that must not be
/// written, or a run that has reported (exit code 4). Throws nothing.
void report_failure(const Session& session, const CommandLine& line, const Failure& failure) noexcept;

/// check, with GITHUB_ACTIONS=true: an annotation on stderr. Throws nothing.
void annotate_failure(const CommandLine& line, const Failure& failure, const Environment& environment) noexcept;

}  // namespace gradclip
