#include "gradclip/training/accumulate.hpp"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "commands.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/dump/partial_output.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/stream/work_plan.hpp"
#include "gradclip/training/label_tokens.hpp"

namespace gradclip {
namespace {

/// Where a result is made that is only to be compared. Process 0 makes it, and removes it.
class ScratchDirectory {
 public:
  explicit ScratchDirectory(Communicator& comm) : mine_(comm.process() == 0) {
    std::string made;
    if (mine_) {
      made = (std::filesystem::temp_directory_path() / "gradclip-XXXXXX").string();
      if (::mkdtemp(made.data()) == nullptr) throw system_error(made, "create", errno);
    }
    path_ = broadcast_string(comm, std::move(made), 0);
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    if (mine_) std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  bool mine_;
  std::filesystem::path path_;
};

MicrobatchDumps open_microbatches(Session& session, const CommandLine& line) {
  MicrobatchDumps dumps;
  const auto open = [&](const std::filesystem::path& dump) {
    dumps.push_back(std::make_unique<DumpReader>(dump, session.manifest_of(dump)));
  };
  open(line.dump);
  for (const std::filesystem::path& dump : line.more_dumps) open(dump);
  order_microbatches(dumps);
  for (const std::unique_ptr<DumpReader>& dump : dumps) {
    if (!line.output.empty()) require_apart(dump->directory(), line.output, line.overwrite);
    session.check_report_path(dump->directory(), line.output);
  }
  return dumps;
}

ReportAccumulate accumulated_facts(const MicrobatchDumps& dumps, const AccumulateResult& result,
                                   const std::filesystem::path& output) {
  ReportAccumulate facts;
  for (std::size_t k = 0; k < dumps.size(); ++k) {
    facts.microbatches.push_back({*dumps[k]->manifest().microbatch, result.ends[k]});
  }
  facts.windows = result.windows();
  facts.reduced = result.reduced;
  facts.reduce_dtypes = result.reduce_dtypes;
  facts.storage_dtypes = result.storage_dtypes;
  if (!output.empty()) facts.output = output.string();
  facts.bytes = result.bytes;
  return facts;
}

/// What `tokens` finds of the labels in the output. Where the mesh does not tell whose labels are the same, nothing.
std::vector<Finding> label_findings(Session& session, const CommandLine& line, const std::filesystem::path& output) {
  DumpReader made(output);
  const Manifest& manifest = made.manifest();
  try {
    const LabelOptions options = label_options(line.labels, line.scale.pp_axis, manifest.training);
    return count_label_tokens(made, session.comm(), plan_work(manifest, session.comm().size()), options).findings;
  } catch (const Error& error) {
    if (error.code() != ExitCode::bad_input) throw;
    return {};
  }
}

/// The replay's result against what training had, by `diff`'s rule.
Report checked(Session& session, const CommandLine& line, const DiffOptions& options,
               const std::filesystem::path& result, DumpReader& training) {
  DumpReader made(result);
  DiffRun run = session.run_over(made, &training, "the replay's result is compared in host memory");
  const DiffResult found = compare_dumps(run, options);
  return diff_report(shown_output(line), made.manifest(), training.directory(), training.manifest(), options.rule,
                     found, session.facts(line.common.numerics));
}

}  // namespace

std::string shown_output(const CommandLine& line) {
  return line.output.empty() ? "(accumulated)" : line.output.string();
}

ExitCode run_accumulate(Session& session, const CommandLine& line) {
  const DiffOptions options = diff_options(line.diff);
  const MicrobatchDumps dumps = open_microbatches(session, line);
  std::optional<DumpReader> training;
  if (line.checked) {
    training.emplace(*line.checked, session.manifest_of(*line.checked));
    if (!line.output.empty()) require_apart(*line.checked, line.output, line.overwrite);
    session.check_report_path(*line.checked, line.output);
  }
  std::optional<ScratchDirectory> scratch;
  if (line.output.empty()) scratch.emplace(session.comm());
  const std::filesystem::path output = scratch ? scratch->path() / "accumulated" : line.output;
  DumpWriter writer(*dumps[0], output, line.overwrite);
  writer.read_back(line.paranoid);

  AccumulateResult result = accumulate_microbatches(session.run_over(dumps), line.accumulate, writer);
  if (result.labelled) {
    const std::vector<Finding> found = label_findings(session, line, output);
    result.findings.insert(result.findings.end(), found.begin(), found.end());
  }
  Report report = accumulate_report(line.dump, dumps[0]->manifest(), accumulated_facts(dumps, result, line.output),
                                    result.findings, session.facts(line.common.numerics));
  bool differs = false;
  if (training) {
    Report diff = checked(session, line, options, output, *training);
    differs = !diff.findings.empty();
    report.run->seconds_total = diff.run->seconds_total;
    add_check(report, std::move(diff));
  }
  session.publish(report, write_accumulated);
  const bool refused = differs || (line.common.strict && !report.findings.empty());
  return refused ? ExitCode::findings : ExitCode::done;
}

}  // namespace gradclip
