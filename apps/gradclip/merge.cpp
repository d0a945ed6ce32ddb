#include "gradclip/analysis/merge.hpp"

#include "commands.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {

ExitCode run_merge(Session& session, const CommandLine& line) {
  std::optional<NamePattern> only;
  if (line.merge.only) only.emplace(*line.merge.only, "--only");
  DumpReader dump(line.dump);
  const std::unique_ptr<MergedOutput> output = make_merged_output(dump, line.output, line.overwrite, line.merge.format);
  session.check_report_path(line.dump, line.output);

  DiffRun run = session.run_over(dump, nullptr, "tensors are put together in host memory");
  const MergeResult result = merge_dump(run, only ? &*only : nullptr, *output);

  ReportRun facts = session.facts(line.common.numerics);
  if (session.speaks()) {
    session.publish(merge_report(line.dump, dump.manifest(), line.output, line.merge.format, result, std::move(facts)),
                    write_merged);
  }
  return line.common.strict && !result.findings.empty() ? ExitCode::findings : ExitCode::done;
}

}  // namespace gradclip
