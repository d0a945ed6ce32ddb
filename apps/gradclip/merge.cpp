#include "gradclip/analysis/merge.hpp"

#include <algorithm>

#include "commands.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/stream/work_plan.hpp"

namespace gradclip {
namespace {

/// Whether a rank has labels, damaged ones too. Collective.
bool holds_labels(Communicator& comm, DumpReader& dump) {
  const WorkPlan plan = plan_work(dump.manifest(), comm.size());
  std::uint8_t mine = 0;
  for (const std::int32_t rank : plan.ranks(comm.process())) {
    if (mine != 0) break;
    try {
      mine = dump.rank_file(rank)->labels().empty() ? 0 : 1;
    } catch (const Error& error) {
      if (error.code() != ExitCode::bad_input) throw;
      mine = 1;
    }
  }
  const std::vector<std::uint8_t> all = gather_value(comm, mine);
  return std::find(all.begin(), all.end(), 1) != all.end();
}

/// A dump is a directory, which no reader of safetensors files opens.
void refuse_misleading_name(const std::filesystem::path& output, MergeFormat format) {
  if (format == MergeFormat::safetensors || output.extension() != ".safetensors") return;
  throw Error(ExitCode::usage, {.where = "--output " + gradclip::quoted(output.string()),
                                .found = "a safetensors file's name for a dump, which is a directory",
                                .expected = "--safetensors with it, or another name",
                                .advice = {}});
}

}  // namespace

ExitCode run_merge(Session& session, const CommandLine& line) {
  std::optional<NamePattern> only;
  if (line.merge.only) only.emplace(*line.merge.only, "--only");
  refuse_misleading_name(line.output, line.merge.format);
  DumpReader dump = session.open(line.dump);
  const std::unique_ptr<MergedOutput> output = make_merged_output(dump, line.output, line.overwrite, line.merge.format);
  session.check_report_path(line.dump, line.output);

  DiffRun run = session.run_over(dump, nullptr, "tensors are put together in host memory");
  const MergeResult result = merge_dump(run, only ? &*only : nullptr, *output);
  const bool labels = holds_labels(run.comm, dump);

  ReportRun facts = session.facts(line.common.numerics);
  if (session.speaks()) {
    session.publish(
        merge_report(line.dump, dump.manifest(), line.output, line.merge.format, result, labels, std::move(facts)),
        write_merged);
  }
  return line.common.strict && !result.findings.empty() ? ExitCode::findings : ExitCode::done;
}

}  // namespace gradclip
