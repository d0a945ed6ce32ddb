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
#include "gradclip/base/worker_pool.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/dump/new_rank_file.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/stream/work_plan.hpp"
#include "gradclip/training/slices.hpp"
#include "gradclip/training/step_labels.hpp"
#include "gradclip/training/window_replay.hpp"
#include "gradclip/writing/joint_dump.hpp"

namespace gradclip {
namespace {

/// The scale of a float8 gradient. Where weights are cached it may be recorded with the first microbatch alone, and
/// later ones reuse it.
float scale_inv_of(const MicrobatchDumps& dumps, std::size_t microbatch, std::int32_t rank, std::size_t parameter) {
  for (std::size_t k = microbatch + 1; k-- > 0;) {
    const std::shared_ptr<const RankFile> file = dumps[k]->rank_file(rank);
    const StoredShard& shard = file->locate(parameter);
    if (!shard.none && shard.scale_inv) return *shard.scale_inv;
  }
  return 1.0F;
}

class AccumulatedRanks {
 public:
  AccumulatedRanks(const AccumulateRun& run, const std::vector<ReductionPlan>& plans, const std::vector<bool>& ends)
      : run_(run), dumps_(run.dumps), manifest_(dumps_[0]->manifest()), plans_(plans), ends_(ends) {
    for (std::size_t i = 0; i < run.threads; ++i) workers_.emplace_back(run.backend, run.memory / run.threads);
  }

  WrittenRank write(std::int32_t rank, DumpWriter& writer) {
    std::vector<std::size_t> held;
    std::vector<NewGradient> gradients;
    std::vector<std::string> none;
    for (std::size_t p = 0; p < plans_.size(); ++p) {
      const ParameterEntry& entry = plans_[p].output;
      if (!manifest_.holds(entry, rank)) continue;
      if (is_none(p, rank)) {
        none.push_back(entry.recorded_name());
        continue;
      }
      const ShardLayout layout = manifest_.layout(entry, rank);
      held.push_back(p);
      gradients.push_back({entry.dataset, layout.local_shape(), entry.dtype, std::nullopt});
      bytes_ += layout.elements() * size_of(entry.dtype);
    }
    const std::filesystem::path path = writer.writing_directory() / manifest_.rank_file_name(rank);
    const StepLabels labels(dumps_, rank);
    if (labels.incomplete()) without_labels_.push_back(rank);
    NewRankFile made(path, {rank, manifest_.world_size, manifest_.step}, gradients, none, labels.shapes());
    const PosixFile file = PosixFile::open_for_writing(path, false);
    labels.write(file, made.label_offsets());
    labelled_ = labelled_ || !labels.shapes().empty();
    std::vector<std::uint64_t> checksums(held.size());
    parallel_for(held.size(), workers_.size(), [&](std::size_t i, std::size_t worker) {
      checksums[i] = write_shard(held[i], rank, file, made.offsets()[i], workers_[worker]);
    });
    return {rank, made.finish(checksums, writer.reads_back())};
  }

  /// Of the gradients that were written.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  /// Whether any rank has labels.
  [[nodiscard]] bool labelled() const noexcept { return labelled_; }
  /// Ranks that hold labels of some microbatches only.
  [[nodiscard]] const std::vector<std::int32_t>& without_labels() const noexcept { return without_labels_; }

 private:
  [[nodiscard]] bool is_none(std::size_t p, std::int32_t rank) {
    for (const std::int32_t addend : plans_[p].addends(manifest_, rank)) {
      for (const std::unique_ptr<DumpReader>& dump : dumps_) {
        if (!dump->rank_file(addend)->locate(p).none) return false;
      }
    }
    return true;
  }

  std::uint64_t write_shard(std::size_t p, std::int32_t rank, const PosixFile& file, std::uint64_t offset,
                            WindowReplay& worker) {
    const ReductionPlan& plan = plans_[p];
    const ShardLayout kept = manifest_.layout(plan.output, rank);
    const std::vector<std::int32_t> addends = plan.addends(manifest_, rank);
    const std::uint64_t block = worker.block_elements(plan, addends.size());
    Checksum checksum;
    for (std::uint64_t first = 0; first < kept.elements(); first += block) {
      const std::uint64_t count = std::min(block, kept.elements() - first);
      const auto read = [&](std::size_t addend, std::size_t microbatch, std::byte* to) {
        return read_gradient(p, addends[addend], microbatch, kept, {first, count}, to);
      };
      const std::span<const std::byte> stored =
          worker.replay(plan, ends_, addends.size(), static_cast<std::uint32_t>(count), read);
      checksum.update(stored.data(), stored.size());
      file.write(offset + first * size_of(plan.output.dtype), stored.data(), stored.size());
    }
    return checksum.digest();
  }

  std::optional<MicrobatchGradient> read_gradient(std::size_t p, std::int32_t rank, std::size_t microbatch,
                                                  const ShardLayout& kept,
                                                  std::pair<std::uint64_t, std::uint64_t> elements, std::byte* to) {
    const std::shared_ptr<const RankFile> file = dumps_[microbatch]->rank_file(rank);
    const StoredShard& shard = file->locate(p);
    if (shard.none) return std::nullopt;
    read_slice(*file, shard, kept, elements.first, elements.second, to);
    if (run_.progress) run_.progress(elements.second * size_of(shard.dtype));
    if (size_of(shard.dtype) != 1) return MicrobatchGradient{shard.dtype, 1.0F};
    return MicrobatchGradient{shard.dtype, scale_inv_of(dumps_, microbatch, rank, p)};
  }

  const AccumulateRun& run_;
  const MicrobatchDumps& dumps_;
  const Manifest& manifest_;
  const std::vector<ReductionPlan>& plans_;
  const std::vector<bool>& ends_;
  std::vector<WindowReplay> workers_;
  std::uint64_t bytes_ = 0;
  bool labelled_ = false;
  std::vector<std::int32_t> without_labels_;
};

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
  return edited_manifest(dumps[0]->directory(), {{"microbatch", "null"},
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
  AccumulatedRanks ranks(run, plans, result.ends);
  const auto write_mine = [&] {
    const WorkPlan plan = plan_work(manifest, run.comm.size());
    std::vector<WrittenRank> written;
    for (const std::int32_t rank : plan.ranks(run.comm.process())) {
      written.push_back(ranks.write(rank, writer));
    }
    for (const std::unique_ptr<DumpReader>& dump : run.dumps) dump->require_unchanged();
    return written;
  };
  write_jointly(run.comm, writer, manifest, {}, write_mine, [&](const std::map<std::string, FileRecord>& files) {
    return manifest_of(run.dumps, plans, options, result, files);
  });
  report_labels(gather_values(run.comm, std::span<const std::int32_t>(ranks.without_labels())), result.findings);
  for (const std::uint64_t bytes : gather_value(run.comm, ranks.bytes())) result.bytes += bytes;
  for (const std::uint8_t labelled : gather_value(run.comm, static_cast<std::uint8_t>(ranks.labelled()))) {
    result.labelled = result.labelled || labelled != 0;
  }
  return result;
}

}  // namespace gradclip
