#include "gradclip/training/accumulate.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/stream/work_plan.hpp"
#include "gradclip/training/output_ranks.hpp"
#include "gradclip/training/replay_rounds.hpp"
#include "gradclip/training/window_replay.hpp"
#include "gradclip/writing/joint_dump.hpp"

namespace gradclip {
namespace {

/// Bytes that a part of the work may take, of what the budget has beside the backend's working space and open files.
std::size_t part_of(std::size_t memory_budget) {
  return std::clamp<std::size_t>(memory_budget / 8, std::size_t{1} << 20, std::size_t{256} << 20);
}

std::vector<WrittenRank> write_ranks(const AccumulateRun& run, const ReplayRun& replay,
                                     std::span<const std::int32_t> ranks, OutputRanks& output, DumpWriter& writer) {
  std::vector<WrittenRank> written;
  while (!ranks.empty()) {
    ranks = ranks.subspan(output.take(ranks, part_of(run.memory_budget)));
    output.create(writer);
    ReplayRounds(replay, output).replay();
    const std::vector<WrittenRank> finished = output.finish(writer);
    written.insert(written.end(), finished.begin(), finished.end());
  }
  for (const std::unique_ptr<DumpReader>& dump : run.dumps) dump->require_unchanged();
  return written;
}

std::string flag_text(const std::optional<bool>& flag) {
  return flag ? fmt::format("{}", *flag) : "null";
}

/// What the output's manifest says of the replay.
std::string record_text(const MicrobatchDumps& dumps, const AccumulateOptions& options,
                        const AccumulateResult& result) {
  const auto type = [](const std::optional<DType>& dtype) {
    return dtype ? fmt::format("\"{}\"", name(*dtype)) : std::string("null");
  };
  std::vector<std::string> flags;
  for (std::size_t k = 0; k < dumps.size(); ++k) {
    const MicrobatchRecord& record = *dumps[k]->manifest().microbatch;
    flags.push_back(fmt::format(R"({{"first_microbatch":{},"optimizer_step":{},"ends_window":{}}})",
                                flag_text(record.first_microbatch), flag_text(record.optimizer_step),
                                static_cast<bool>(result.ends[k])));
  }
  return fmt::format(R"({{"microbatches":{},"windows":{},"reduce_dtype":{},"dtype":{},"flags":[{}]}})", dumps.size(),
                     result.windows(), type(options.types.reduce), type(options.types.storage), fmt::join(flags, ","));
}

std::string manifest_of(const MicrobatchDumps& dumps, const std::vector<ReductionPlan>& plans,
                        const AccumulateOptions& options, const AccumulateResult& result,
                        const std::map<std::string, FileRecord>& files) {
  const Manifest& manifest = dumps[0]->manifest();
  std::vector<std::string> entries;
  for (const ReductionPlan& plan : plans) {
    entries.push_back(parameter_text(plan.output, plan.output.mesh ? &manifest.meshes[*plan.output.mesh] : nullptr));
  }
  return edited_manifest(dumps[0]->directory(), manifest,
                         {{"microbatch", "null"},
                          {"accumulation", ""},
                          {"parameters", parameters_text(entries)},
                          {"files", files_text(files)},
                          {"accumulate", record_text(dumps, options, result)}});
}

void add_once(DType dtype, std::vector<DType>& types) {
  if (std::find(types.begin(), types.end(), dtype) == types.end()) types.push_back(dtype);
}

void report_labels(std::vector<std::int32_t> ranks, std::vector<Finding>& findings) {
  if (ranks.empty()) return;
  findings.push_back({.kind = "labels-incomplete",
                      .parameter = {},
                      .ranks = std::move(ranks),
                      .index = {},
                      .value = {},
                      .message = "labels of some microbatches only: the output has none of these ranks"});
}

}  // namespace

std::uint64_t AccumulateResult::windows() const noexcept {
  return static_cast<std::uint64_t>(std::count(ends.begin(), ends.end(), true));
}

AccumulateResult accumulate_microbatches(const AccumulateRun& run, const AccumulateOptions& options,
                                         DumpWriter& writer) {
  GRADCLIP_CHECK(!run.dumps.empty() && run.threads > 0, "nothing to work on, or with");
  const Manifest& manifest = run.dumps[0]->manifest();
  AccumulateResult result;
  result.ends = synchronisation_windows(run.dumps, options.sync);
  result.findings = flag_findings(run.dumps);
  std::vector<ReductionPlan> plans;
  for (const ParameterEntry& entry : manifest.parameters) {
    plans.push_back(plan_reduction(manifest, entry, options.types));
    result.reduced += plans.back().reduces() ? 1 : 0;
    add_once(plans.back().reduce, result.reduce_dtypes);
    add_once(plans.back().output.dtype, result.storage_dtypes);
  }
  OutputRanks output(run.dumps, plans);
  std::vector<WindowReplay> workers;
  for (std::size_t i = 0; i < run.threads; ++i) workers.emplace_back(run.backend, run.memory / run.threads);
  const ReplayRun replay{run.dumps, plans, result.ends, workers, part_of(run.memory_budget), run.progress};
  const auto write_mine = [&] {
    const WorkPlan plan = plan_work(manifest, run.comm.size());
    return write_ranks(run, replay, plan.ranks(run.comm.process()), output, writer);
  };
  write_jointly(run.comm, writer, manifest, {}, write_mine, [&](const std::map<std::string, FileRecord>& files) {
    return manifest_of(run.dumps, plans, options, result, files);
  });
  report_labels(gather_values(run.comm, std::span<const std::int32_t>(output.without_labels())), result.findings);
  for (const std::uint64_t bytes : gather_value(run.comm, output.bytes())) result.bytes += bytes;
  for (const std::uint8_t labelled : gather_value(run.comm, static_cast<std::uint8_t>(output.labelled()))) {
    result.labelled = result.labelled || labelled != 0;
  }
  return result;
}

}  // namespace gradclip
