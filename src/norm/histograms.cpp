#include "gradclip/norm/histograms.hpp"

#include <algorithm>

#include "gradclip/stream/task_list.hpp"

namespace gradclip {
namespace {

/// Parameters whose counts go through one exchange: bounds what travels at a time.
constexpr std::size_t kParametersPerExchange = 16'384;

/// Counts that are not of an exponent, numbered above all of these.
constexpr std::int32_t kZeros = 2000, kNan = 2001, kPosinf = 2002, kNeginf = 2003, kCasts = 2004;

/// One number of a histogram as it travels. Trivially copyable.
struct Count {
  std::uint32_t parameter = 0;
  std::int32_t what = 0;  ///< an exponent, or one of the above
  std::uint64_t count = 0;
};

void append_counts(std::vector<Count>& counts, std::size_t parameter, const ExponentHistogram& histogram) {
  const auto append = [&](std::int32_t what, std::uint64_t count) {
    if (count != 0) counts.push_back({static_cast<std::uint32_t>(parameter), what, count});
  };
  append(kZeros, histogram.zeros);
  append(kNan, histogram.nan);
  append(kPosinf, histogram.posinf);
  append(kNeginf, histogram.neginf);
  for (std::size_t i = 0; i < histogram.counts.size(); ++i) {
    append(histogram.first + static_cast<std::int32_t>(i), histogram.counts[i]);
  }
  std::int32_t what = kCasts;
  for (const CastCounts& cast : histogram.casts) {
    append(what++, cast.to_zero);
    append(what++, cast.to_subnormal);
    append(what++, cast.overflow);
  }
}

void add_count(ExponentHistogram& histogram, const Count& count) {
  switch (count.what) {
    case kZeros:
      histogram.zeros += count.count;
      return;
    case kNan:
      histogram.nan += count.count;
      return;
    case kPosinf:
      histogram.posinf += count.count;
      return;
    case kNeginf:
      histogram.neginf += count.count;
      return;
    default:
      break;
  }
  if (count.what < kCasts) {
    histogram.add(count.what, count.count);
    return;
  }
  const auto place = static_cast<std::size_t>(count.what - kCasts);
  CastCounts& cast = histogram.casts.at(place / 3);
  (place % 3 == 0 ? cast.to_zero : place % 3 == 1 ? cast.to_subnormal : cast.overflow) += count.count;
}

}  // namespace

HistogramCollector::HistogramCollector(const Manifest& manifest, const std::vector<bool>& expert, std::size_t workers)
    : manifest_(manifest), expert_(expert), workers_(workers), parameters_(manifest.parameters.size()) {}

void HistogramCollector::choose(std::span<ShardTask> tasks) const {
  for (ShardTask& task : tasks) {
    const ParameterEntry& entry = manifest_.parameters[task.parameter];
    task.shown = !entry.has_partial() && is_counted_copy(manifest_, entry, task.rank, expert_[task.parameter]);
  }
}

StoredSink HistogramCollector::sink(std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors) {
  tasks_ = tasks;
  return [this, tasks, factors](std::size_t number, const StoredElements& elements) {
    Worker& worker = workers_[number];
    if (worker.counter && worker.task != elements.task) finish(worker, tasks[worker.task].parameter);
    const ShardTask& task = tasks[elements.task];
    if (!worker.counter) worker.counter.emplace(task.shard->dtype, factors[task.factors]);
    worker.task = elements.task;
    worker.counter->add(elements.data, elements.count);
  };
}

void HistogramCollector::finish_pass() {
  for (Worker& worker : workers_) {
    if (worker.counter) finish(worker, tasks_[worker.task].parameter);
  }
}

void HistogramCollector::finish(Worker& worker, std::size_t parameter) {
  const ExponentHistogram histogram = worker.counter->histogram();
  worker.counter.reset();
  const std::lock_guard lock(mutex_);
  parameters_[parameter].add(histogram);
}

void HistogramCollector::count_stand_ins(Run& run, const ParameterFactors& factors, const Absences& absences) {
  const FactorsOf factors_of = [&](std::size_t parameter, std::int32_t) { return factors.of[parameter]; };
  for (const Substitute& one : absences.substitutes()) {
    if (manifest_.parameters[one.parameter].has_partial()) continue;
    if (run.plan.process_of(one.used) != run.comm.process()) continue;
    TaskList list = list_tasks(run.dump, {one.parameter, one.parameter + 1}, one.used, factors_of);
    for (ShardTask& task : list.tasks) task.shown = true;
    run.stream.measure(list.tasks, list.factors, {}, {}, sink(list.tasks, list.factors));
    finish_pass();
  }
}

void HistogramCollector::count(std::size_t parameter, DType dtype, const std::byte* elements, std::uint64_t count) {
  ElementCounter counter(dtype, {});
  counter.add(elements, count);
  parameters_[parameter].add(counter.histogram());
}

Histograms HistogramCollector::gather(Communicator& comm, bool zero_nonfinite) const {
  Histograms all;
  all.parameters.resize(parameters_.size());
  for (std::size_t begin = 0; begin < parameters_.size(); begin += kParametersPerExchange) {
    const std::size_t end = std::min(parameters_.size(), begin + kParametersPerExchange);
    std::vector<Count> mine;
    for (std::size_t p = begin; p < end; ++p) append_counts(mine, p, parameters_[p]);
    for (const Count& count : gather_values(comm, std::span<const Count>(mine))) {
      add_count(all.parameters[count.parameter], count);
    }
  }
  const std::vector<bool> counted = counted_entries(manifest_);
  for (std::size_t p = 0; p < all.parameters.size(); ++p) {
    if (zero_nonfinite) all.parameters[p] = with_nonfinite_zeroed(std::move(all.parameters[p]));
    if (counted[p]) all.total.add(all.parameters[p]);
  }
  return all;
}

}  // namespace gradclip
