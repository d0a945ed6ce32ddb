#pragma once
// What a run that an error ended leaves for those who read its files instead of its exit code.

#include "failure.hpp"
#include "options.hpp"
#include "session.hpp"

namespace gradclip {

/// Where --report is JUnit, puts the error into it: an older file would be read as this run's result. Nothing for a
/// command line that is wrong, a path that must not be written, or a run that has reported (exit code 4). Throws
/// nothing.
void report_failure(const Session& session, const CommandLine& line, const Failure& failure) noexcept;

/// check, with GITHUB_ACTIONS=true: an annotation on stderr. Throws nothing.
void annotate_failure(const CommandLine& line, const Failure& failure, const Environment& environment) noexcept;

}  // namespace gradclip
