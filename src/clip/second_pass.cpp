#include "gradclip/clip/second_pass.hpp"

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gradclip/base/worker_pool.hpp"
#include "gradclip/clip/continued_run.hpp"
#include "gradclip/training/offload.hpp"

namespace gradclip {
namespace {

/// Rank files below this size are streamed together, so that the workers do not run dry between them.
constexpr std::uint64_t kBatchBytes = std::uint64_t{64} << 20;
constexpr std::size_t kBatchFiles = 16;
constexpr std::size_t kBatchTasks = 100'000;

/// Rank files that are written together.
struct Batch {
  TaskList list;
  std::vector<std::int32_t> ranks;
  std::vector<std::unique_ptr<RankFileWriter>> files;
  std::vector<TensorStatistics> statistics;  // of what was written to each file
  std::vector<RankFileWriter*> writer_of_task;
  std::vector<std::size_t> file_of_task;
  std::uint64_t bytes = 0;
};

/// A rank file that an earlier run has written.
struct KeptFile {
  FileRecord record;
  TensorStatistics statistics;
};

class ClippedWriter {
 public:
  ClippedWriter(Run& run, DumpWriter& output, const FactorsOf& factors_of, const std::vector<bool>& expert,
                NormOrder order)
      : run_(run),
        manifest_(run.dump.manifest()),
        output_(output),
        factors_of_(factors_of),
        expert_(expert),
        request_{order},
        counted_(counted_entries(manifest_)) {}

  SecondPass write() {
    run_.stream.storage().keep_no_more();
    find_kept();
    const std::span<const std::int32_t> mine = run_.plan.ranks(run_.comm.process());
    // Offloading moves a whole part for each batch: as few batches as can be.
    const std::uint64_t most_bytes = offloads(run_.stream) ? std::uint64_t{1} << 62 : kBatchBytes;
    for (std::size_t next = 0; next < mine.size();) {
      auto batch = std::make_unique<Batch>();
      const std::size_t most_files = std::clamp<std::size_t>(run_.dump.capacity() / 4, 1, kBatchFiles);
      while (next < mine.size() && batch->bytes < most_bytes && batch->files.size() < most_files &&
             batch->list.tasks.size() < kBatchTasks) {
        append(*batch, mine[next++]);
      }
      if (batch->files.empty()) continue;
      stream(*batch);
      finish_in_background(std::move(batch));
    }
    collect_finished();

    const Absences absences(run_, expert_, none_);
    measure_substitutes(absences);
    run_.dump.require_unchanged();  // what was measured is what was written

    SecondPass result;
    result.files = std::move(records_);
    result.total = measured_total(run_, request_.order, statistics_, factors_of_, absences);
    return result;
  }

 private:
  /// Reads what an earlier run has finished of this process's rank files.
  void find_kept() {
    const std::span<const std::int32_t> mine = run_.plan.ranks(run_.comm.process());
    std::vector<std::optional<KeptFile>> kept(mine.size());
    parallel_for(mine.size(), run_.stream.options().threads, [&](std::size_t i, std::size_t) {
      const std::optional<FinishedFile> file = output_.finished(mine[i]);
      if (!file) return;
      if (const auto statistics = noted_statistics(file->note)) kept[i] = KeptFile{file->record, *statistics};
    });
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (kept[i]) kept_.emplace(mine[i], *kept[i]);
    }
  }

  /// @return whether the rank's file is there already.
  bool take_over(std::int32_t rank) {
    const auto found = kept_.find(rank);
    if (found == kept_.end()) return false;
    records_.emplace_back(rank, found->second.record);
    records_.back().kept = 1;
    statistics_.push_back({rank, found->second.statistics});
    return true;
  }

  void append(Batch& batch, std::int32_t rank) {
    TaskList list = list_tasks(run_.dump, {0, manifest_.parameters.size()}, rank, factors_of_);
    none_.insert(none_.end(), list.none.begin(), list.none.end());
    if (take_over(rank)) return;
    batch.ranks.push_back(rank);
    batch.statistics.emplace_back();
    batch.files.push_back(output_.begin(run_.dump.rank_file(rank)));
    for (std::size_t i = 0; i < list.tasks.size(); ++i) {
      ShardTask task = list.tasks[i];
      const ParameterEntry& entry = manifest_.parameters[task.parameter];
      task.measured = counted_[task.parameter] && !entry.has_partial() &&
                      is_counted_copy(manifest_, entry, rank, expert_[task.parameter]);
      task.factors = static_cast<std::uint32_t>(batch.list.factors.size());
      batch.list.factors.push_back(list.factors[i]);
      batch.bytes += task.shard->elements * size_of(task.shard->dtype);
      batch.list.tasks.push_back(std::move(task));
      batch.writer_of_task.push_back(batch.files.back().get());
      batch.file_of_task.push_back(batch.files.size() - 1);
    }
  }

  /// Where the copy that should count is None, the next one counts, as in the first pass: it is scaled once more, and
  /// measured as it was written.
  void measure_substitutes(const Absences& absences) {
    for (const Substitute& one : absences.substitutes()) {
      const bool counts = counted_[one.parameter] && !manifest_.parameters[one.parameter].has_partial();
      if (counts && run_.plan.process_of(one.used) == run_.comm.process()) measure_substitute(one.parameter, one.used);
    }
  }

  void measure_substitute(std::size_t parameter, std::int32_t rank) {
    const TaskList list = list_tasks(run_.dump, {parameter, parameter + 1}, rank, factors_of_);
    statistics_.push_back({rank, {}});
    run_.stream.measure(list.tasks, list.factors, request_, [&](const MeasuredChunk& chunk) {
      gradclip::append(statistics_.back().statistics, chunk.statistics, chunk.count, chunk.position, request_.order);
    });
  }

  void stream(Batch& batch) {
    std::vector<TensorStatistics> of_task(batch.list.tasks.size());
    for (const TaskGroup& group : writing_groups(run_.stream, batch.list.tasks)) {
      std::vector<ShardTask> tasks;
      std::vector<RankFileWriter*> writers;
      for (const std::size_t i : group.tasks) {
        tasks.push_back(batch.list.tasks[i]);
        writers.push_back(batch.writer_of_task[i]);
      }
      ModelPart& part = run_.stream.storage().part(group.model_part.value_or(0));
      const ScopedModuleOffloading on_device(part, run_.backend, group.model_part.has_value());
      run_.stream.scale(tasks, writers, batch.list.factors, request_, [&](const MeasuredChunk& chunk) {
        gradclip::append(of_task[group.tasks[chunk.task]], chunk.statistics, chunk.count, chunk.position,
                         request_.order);
      });
    }
    for (std::size_t i = 0; i < of_task.size(); ++i) {
      add(batch.statistics[batch.file_of_task[i]], of_task[i], request_.order);
    }
    for (std::size_t i = 0; i < batch.ranks.size(); ++i) statistics_.push_back({batch.ranks[i], batch.statistics[i]});
  }

  /// Checksums and syncs a batch while the next one is streamed.
  void finish_in_background(std::unique_ptr<Batch> batch) {
    collect_finished();
    // A batch of all rank files has no next one to hide behind.
    const std::size_t threads = offloads(run_.stream) ? run_.stream.options().threads : 1;
    pending_ = std::async(std::launch::async, [this, threads, finished = std::move(batch)] {
      std::vector<WrittenRank> records(finished->files.size());
      parallel_for(records.size(), threads, [&](std::size_t i, std::size_t) {
        const FileRecord record = finished->files[i]->finish(output_.reads_back());
        output_.note_finished(finished->ranks[i], {record, note_of(finished->statistics[i])});
        records[i] = {finished->ranks[i], record};
      });
      return records;
    });
  }

  void collect_finished() {
    if (!pending_.valid()) return;
    const std::vector<WrittenRank> records = pending_.get();
    records_.insert(records_.end(), records.begin(), records.end());
  }

  Run& run_;
  const Manifest& manifest_;
  DumpWriter& output_;
  const FactorsOf& factors_of_;
  const std::vector<bool>& expert_;
  StatisticsRequest request_;
  std::vector<bool> counted_;
  std::vector<RankStatistics> statistics_;
  std::vector<NoneShard> none_;
  std::map<std::int32_t, KeptFile> kept_;  // by recorded rank of this process
  std::vector<WrittenRank> records_;
  std::future<std::vector<WrittenRank>> pending_;
};

}  // namespace

SecondPass write_clipped(Run& run, DumpWriter& output, const FactorsOf& factors_of, const std::vector<bool>& expert,
                         NormOrder order) {
  return ClippedWriter(run, output, factors_of, expert, order).write();
}

}  // namespace gradclip
