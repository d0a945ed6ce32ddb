#pragma once
// The norm of the whole model's gradient from its shards: chunks -> shards -> parameters -> total, in a fixed order,
// the same bits for any number of processes and threads (docs/arithmetic.md).

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/backend/element_counts.hpp"
#include "gradclip/base/finding.hpp"
#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/norm/statistics.hpp"
#include "gradclip/stream/shard_stream.hpp"
#include "gradclip/stream/task_list.hpp"
#include "gradclip/stream/work_plan.hpp"

namespace gradclip {

/// Everything that a run works with. Borrowed; built by the composition root.
struct Run {
  DumpReader& dump;
  Backend& backend;
  Communicator& comm;
  WorkPlan plan;
  ShardStream& stream;
};

/// Whose arithmetic forms the totals that the recorded ranks saw, and divides and clips (docs/arithmetic.md).
enum class Numerics : std::uint8_t { exact, automodel, automodel_cpu, torch };
[[nodiscard]] std::string_view name(Numerics numerics) noexcept;  ///< as --numerics takes it

/// What happens to each parameter's elements before they are measured: one entry per manifest parameter.
struct ParameterFactors {
  std::vector<ScaleFactors> of;  ///< scaling only; clip is ClipStep::none and zero_nonfinite false
  std::vector<bool> expert;      ///< whether the parameter is an expert's
  /// NaN and infinities are measured as 0 (but counted and placed in findings first).
  bool zero_nonfinite = false;
};

/// One parameter of the report: statistics of its counted elements.
struct ParameterNorm {
  TensorStatistics statistics;
  double norm = 0.0;
  double share = 0.0;      ///< norm^p / total^p; NaN if the total is not finite, 0 if nothing was counted
  bool counted = true;     ///< false for later entries of a tied weight
  std::uint32_t none = 0;  ///< recorded ranks whose gradient was None
};

/// A total that recorded ranks would have used, with these ranks.
struct RankTotal {
  double total = 0.0;
  DType dtype = DType::float64;     ///< of the tensor that held it: narrower for torch's own
  std::vector<std::int32_t> ranks;  ///< ascending
};

/// The total as each recorded rank saw it.
struct ReferenceView {
  std::string arithmetic;         ///< "exact", "automodel", "automodel-cpu", "torch"
  std::string note;               ///< why another arithmetic than the one asked for was taken; else empty
  std::vector<RankTotal> totals;  ///< distinct totals, by their lowest rank
  /// Index into totals of each recorded rank; world_size entries; -1 for a rank without parameters.
  std::vector<std::int32_t> total_of_rank;
};

/// Of the elements that the norm counts, after scaling (and combining).
struct Histograms {
  std::vector<ExponentHistogram> parameters;  ///< in manifest order
  ExponentHistogram total;                    ///< later entries of a tied weight left out
};

struct NormResult {
  /// By recorded rank: of the elements that count there, so that all ranks' together are the whole. A copy counts on
  /// the first rank that holds it and is not None, a tied weight in its first entry, a combined Partial value on the
  /// rank of its first addend. first_nonfinite is meaningless.
  std::map<std::int32_t, TensorStatistics> ranks;
  NormOrder order;
  double total = 0.0;                     ///< exact, whatever the numerics
  TensorStatistics statistics;            ///< of all counted elements
  std::vector<ParameterNorm> parameters;  ///< in manifest order
  ReferenceView reference;
  std::vector<Finding> findings;
  std::optional<Histograms> histograms;  ///< if they were asked for
};

/// Which ranks' totals the training step combined over pipeline stages.
struct PipelineView {
  bool enabled = false;
  std::size_t device_mesh = 0;  ///< index into Manifest::meshes
  std::size_t dimension = 0;    ///< of the pp axis in it
};

/// Statistics of one recorded rank's counted shards. Trivially copyable.
struct RankStatistics {
  std::int32_t rank = 0;
  TensorStatistics statistics;
};

/// By parameter: false for the later entries of a tied weight, which count once.
[[nodiscard]] std::vector<bool> counted_entries(const Manifest& manifest);
/// Whether the rank's copy is the one that counts: at coordinate 0 of every Replicate dimension, or the lowest rank's
/// of plain copies.
[[nodiscard]] bool is_counted_copy(const Manifest& manifest, const ParameterEntry& parameter, std::int32_t rank,
                                   bool expert);

/// Whether other recorded ranks hold copies of the parameter's shards, or other entries do (a tied weight).
[[nodiscard]] bool has_copies(const Manifest& manifest, const ParameterEntry& parameter, bool expert);

/// A declared copy whose gradient was None, and the next copy, which counts in its place.
struct Substitute {
  std::uint32_t parameter = 0;
  std::int32_t declared = 0;
  std::int32_t used = 0;
};

/// None gradients, as far as other ranks' copies or addends make up for them.
class Absences {
 public:
  /// Collective. @param mine  the None shards of this process's recorded ranks
  Absences(Run& run, const std::vector<bool>& expert, std::span<const NoneShard> mine);

  [[nodiscard]] bool is_none(std::size_t parameter, std::int32_t rank) const {
    return none_.count({parameter, rank}) != 0;
  }
  /// The rank whose copy counts where `declared`'s is None; `declared` itself if its is not, or all are.
  [[nodiscard]] std::int32_t counted(std::size_t parameter, std::int32_t declared) const;
  /// Ascending by parameter and declared rank.
  [[nodiscard]] const std::vector<Substitute>& substitutes() const noexcept { return substitutes_; }

 private:
  std::set<std::pair<std::size_t, std::int32_t>> none_;
  std::vector<Substitute> substitutes_;
};

/// First pass: statistics of all scaled gradients, replicas compared, Partial dimensions combined, the total and what
/// each recorded rank saw. Collective; every process gets the same result.
/// @param histograms  whether elements are counted by exponent too: on the host, whatever the backend
[[nodiscard]] NormResult measure_gradients(Run& run, const ParameterFactors& factors, NormOrder order,
                                           Numerics numerics, const PipelineView& pipeline, bool histograms = false);

/// The p-norm of what `shards` (by recorded rank) and Partial parameters add up to: for a second pass that measured
/// what it wrote. `factors_of` says what was done to the Partial addends. Collective.
[[nodiscard]] double measured_total(Run& run, NormOrder order, std::span<const RankStatistics> mine,
                                    const FactorsOf& factors_of, const Absences& absences);

}  // namespace gradclip
