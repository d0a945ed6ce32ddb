#include "commands.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/verify/checksums.hpp"

namespace gradclip {

ExitCode run_norms(Session& session, const CommandLine& line) {
  if (!line.sweep.empty()) return run_sweep(session, line);
  DumpReader dump = session.open(line.dump);
  TrainingStep step = training_step(dump.manifest(), line.scale);
  session.check_report_path(line.dump, {});

  Run run = session.run_over(dump, measuring_passes(line));
  if (line.verify) require_recorded_files(run, session.threads());
  const std::vector<Finding> of_labels = take_label_tokens(run, line, step);
  ClipResult result = scale_grads_and_clip_grad_norm(run, step, line.clip, nullptr);
  add_findings(result, of_labels);

  ReportRun facts = session.facts(line.common.numerics);
  if (session.speaks()) {
    Report made =
        clip_report("norms", line.dump, dump.manifest(), step, line.clip, result, std::nullopt, std::move(facts));
    if (line.table.by != ViewBy::parameter) {
      made.view = view_of(line.table.by, line.table.depth, dump.manifest(), step, *result.norm);
    }
    session.publish(made, [&](const Report& report, const TextStyle& style, std::ostream& out) {
      write_norms(report, line.table, style, out);
    });
  }
  return outcome(result, dump.manifest(), line);
}

}  // namespace gradclip
