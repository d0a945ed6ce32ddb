#pragma once
// Histograms of binary exponents by parameter: counted on the host while the first pass reads the shards, of the
// elements that the norm counts.

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "gradclip/backend/element_counts.hpp"
#include "gradclip/norm/total_norm.hpp"

namespace gradclip {

/// What one process has counted so far. Counts are integers, so that neither the order in which blocks are read nor the
/// number of processes changes them.
class HistogramCollector {
 public:
  /// @param expert   by parameter
  /// @param workers  of the stream
  HistogramCollector(const Manifest& manifest, const std::vector<bool>& expert, std::size_t workers);

  /// Marks the tasks whose elements count: of copies the declared one, none of a Partial gradient.
  void choose(std::span<ShardTask> tasks) const;

  /// A sink for one pass. The arguments, and this, outlive it.
  [[nodiscard]] StoredSink sink(std::span<const ShardTask> tasks, std::span<const ScaleFactors> factors);
  /// After a pass, whose tasks may go.
  void finish_pass();

  /// Copies that count in the place of None ones: read once more. Not collective.
  void count_stand_ins(Run& run, const ParameterFactors& factors, const Absences& absences);

  /// Elements that lie in host memory. Not while a pass runs.
  void count(std::size_t parameter, DType dtype, const std::byte* elements, std::uint64_t count);

  /// Of all processes. Collective; every process gets the same.
  /// @param zero_nonfinite  NaN and infinities are counted as 0, as they are measured
  [[nodiscard]] Histograms gather(Communicator& comm, bool zero_nonfinite) const;

 private:
  /// What a worker counts: one shard at a time.
  struct Worker {
    std::size_t task = 0;
    std::optional<ElementCounter> counter;
  };

  void finish(Worker& worker, std::size_t parameter);

  const Manifest& manifest_;
  const std::vector<bool>& expert_;
  std::span<const ShardTask> tasks_;
  std::vector<Worker> workers_;
  std::mutex mutex_;
  std::vector<ExponentHistogram> parameters_;
};

}  // namespace gradclip
