#pragma once
// The commands: each reads as its road, one call a step, and returns the exit code.

#include "gradclip/clip/clip.hpp"
#include "options.hpp"
#include "session.hpp"

namespace gradclip {

[[nodiscard]] ExitCode run_clip(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_norms(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_sweep(Session& session, const CommandLine& line);  ///< norms --sweep
[[nodiscard]] ExitCode run_verify(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_inspect(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_check(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_diff(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_merge(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_accumulate(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_tokens(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_synth(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_report(Session& session, const CommandLine& line);
[[nodiscard]] ExitCode run_doctor(Session& session, const CommandLine& line);

/// For --num-label-tokens auto: gives the step the number that its labels have, and returns what was found on the way.
/// Collective. Errors: Error(bad_input) where labels do not tell the number for the whole step.
[[nodiscard]] std::vector<Finding> take_label_tokens(Run& run, const CommandLine& line, TrainingStep& step);

/// Adds them to those of the gradients, or to the run's own where these were not measured.
void add_findings(ClipResult& result, const std::vector<Finding>& findings);

/// Errors: Error(usage) where --report of `check` is its baseline: a report must not take the baseline's place.
void refuse_baseline_as_report(const CommandLine& line);

/// What `accumulate --check` calls its side of the comparison: OUT, or "(accumulated)" where it keeps none.
[[nodiscard]] std::string shown_output(const CommandLine& line);

/// How often the gradients are read to be measured: a framework's own arithmetic divides by the largest magnitude
/// first.
[[nodiscard]] int measuring_passes(const CommandLine& line) noexcept;

/// How `clip` and `norms` end: findings under --strict, else done. Errors: Error(nonfinite) naming the first offending
/// parameter, if --nonfinite error refused the total.
[[nodiscard]] ExitCode outcome(const ClipResult& result, const Manifest& manifest, const CommandLine& line);

}  // namespace gradclip
