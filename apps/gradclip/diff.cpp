#include "gradclip/analysis/diff.hpp"

#include "commands.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {

ExitCode run_diff(Session& session, const CommandLine& line) {
  const DiffOptions options = diff_options(line.diff);
  DumpReader a = session.open(line.dump);
  DumpReader b = session.open(line.diff.other);
  session.check_report_path(line.dump, {});
  session.check_report_path(line.diff.other, {});

  DiffRun run = session.run_over(a, &b, "gradients are compared in host memory");
  const DiffResult result = compare_dumps(run, options);

  ReportRun facts = session.facts(line.common.numerics);
  if (session.speaks()) {
    session.publish(
        diff_report(line.dump, a.manifest(), line.diff.other, b.manifest(), options.rule, result, std::move(facts)),
        write_differences);
  }
  return result.findings.empty() ? ExitCode::done : ExitCode::findings;
}

}  // namespace gradclip
