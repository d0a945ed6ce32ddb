#include "commands.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {

ExitCode run_norms(Session& session, const CommandLine& line) {
  DumpReader dump(line.dump);
  const TrainingStep step = training_step(dump.manifest(), line.scale);
  session.check_report_path(line.dump, {});

  Run run = session.run_over(dump, 1);
  const ClipResult result = scale_grads_and_clip_grad_norm(run, step, line.clip, nullptr);

  ReportRun facts = session.facts(line.common.numerics);
  if (session.speaks()) {
    session.publish(
        clip_report("norms", line.dump, dump.manifest(), step, line.clip, result, std::nullopt, std::move(facts)),
        [&](const Report& report, const TextStyle& style, std::ostream& out) {
          write_norms(report, line.table, style, out);
        });
  }
  return outcome(result, dump.manifest(), line);
}

}  // namespace gradclip
