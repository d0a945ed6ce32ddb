#include <cstdint>
#include <ostream>
#include <span>

#include "commands.hpp"
#include "github.hpp"
#include "gradclip/analysis/baseline_check.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/verify/checksums.hpp"
#include "output.hpp"

namespace gradclip {
namespace {

void check_paths(const Session& session, const CommandLine& line) {
  if (line.check.options.update) Session::check_written_path("--baseline", line.check.baseline, line.dump);
  session.check_report_path(line.dump, {});
  refuse_baseline_as_report(line);
}

/// In process 0: the verdict, written and told. The baseline comes first: what is told of it is then true.
bool judge(Session& session, const CommandLine& line, const Manifest& manifest, const TrainingStep& step,
           const ClipResult& result, ReportRun facts) {
  const NormResult& norm = *result.norm;
  const Baseline measured = baseline_of(
      manifest, norm,
      {norm.order.p, norm.reference.arithmetic, result.scale.label_token_divisor, result.scale.expert_divisor});
  CheckOptions options = line.check.options;
  options.allow_nonfinite = options.allow_nonfinite && !result.refused;
  CheckResult check = check_against(line.check.baseline, measured, norm.findings, options);
  if (check.next) {
    write_whole_file(
        line.check.baseline, [&](std::ostream& out) { out << baseline_text(*check.next); }, "baseline");
    check.next.reset();
  }
  const Report report = check_report(line.dump, manifest, step, line.clip, result, std::move(check), std::move(facts));
  session.publish(report, write_check);
  tell_github(report, process_environment());
  return report.check->passes();
}

}  // namespace

void refuse_baseline_as_report(const CommandLine& line) {
  if (!line.common.report) return;
  std::error_code error;
  if (resolved_path(*line.common.report, error) != resolved_path(line.check.baseline, error)) return;
  throw Error(ExitCode::usage, {.where = "--report " + gradclip::quoted(line.common.report->string()),
                                .found = "it is the baseline",
                                .expected = "another file",
                                .advice = {}});
}

ExitCode run_check(Session& session, const CommandLine& line) {
  DumpReader dump = session.open(line.dump);
  TrainingStep step = training_step(dump.manifest(), line.scale);
  check_paths(session, line);

  Run run = session.run_over(dump, measuring_passes(line));
  if (line.verify) require_recorded_files(run, session.threads());
  const std::vector<Finding> of_labels = take_label_tokens(run, line, step);
  ClipResult result = scale_grads_and_clip_grad_norm(run, step, line.clip, nullptr);
  add_findings(result, of_labels);

  ReportRun facts = session.facts(line.common.numerics);
  // One process reads and replaces the file: no other one can see it half way, or judge by another one.
  std::uint8_t passes = 0;
  if (session.speaks()) passes = judge(session, line, dump.manifest(), step, result, std::move(facts)) ? 1 : 0;
  session.comm().broadcast(bytes_of(std::span<std::uint8_t>(&passes, 1)), 0);
  static_cast<void>(outcome(result, dump.manifest(), line));  // --nonfinite error
  return passes != 0 ? ExitCode::done : ExitCode::findings;
}

}  // namespace gradclip
