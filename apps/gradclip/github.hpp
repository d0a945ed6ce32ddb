#pragma once
// A run inside a GitHub workflow tells it what it found.

#include "gradclip/report/report.hpp"
#include "machine.hpp"

namespace gradclip {

/// Whether GITHUB_ACTIONS=true.
[[nodiscard]] bool is_github(const Environment& environment);

/// With GITHUB_ACTIONS=true: annotations on stderr, which the runner reads as well as stdout, and the summary appended
/// to the file that GITHUB_STEP_SUMMARY names. A file that cannot be written is a warning: the verdict does not depend
/// on it. In process 0.
void tell_github(const Report& report, const Environment& environment);

}  // namespace gradclip
