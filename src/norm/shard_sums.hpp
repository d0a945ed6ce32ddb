#pragma once
// The first pass: statistics of every shard, summed by parameter and, for what each rank saw, by recorded rank.

#include <cstdint>
#include <map>
#include <vector>

#include "gradclip/norm/total_norm.hpp"
#include "gradclip/stream/task_list.hpp"

namespace gradclip {

class HistogramCollector;

/// One recorded rank's shard of one parameter, measured. Trivially copyable: it travels to the parameter's owner
/// process.
struct ShardResult {
  std::uint32_t parameter = 0;
  std::int32_t rank = 0;
  std::uint64_t fingerprint = 0;  ///< of the stored bytes, if there are copies
  std::uint64_t none = 0;         ///< 1: the gradient was None
  TensorStatistics statistics;    ///< first_nonfinite is the row-major position in the global tensor
};

/// Two shards that should hold the same values and whose bytes differ.
struct Suspect {
  std::uint32_t parameter = 0;
  std::uint32_t other_parameter = 0;  ///< another entry of a tied weight; else the same
  std::int32_t rank = 0;              ///< the copy that counts
  std::int32_t other_rank = 0;
  std::uint64_t elements = 0;
  std::uint64_t fingerprint = 0;  ///< of the other copy: copies with one fingerprint hold the same bytes

  friend auto operator<=>(const Suspect&, const Suspect&) = default;
};

/// A None gradient where other copies are not None.
struct AbsentCopy {
  std::uint32_t parameter = 0;
  std::int32_t rank = 0;
  std::uint32_t left_out = 0;  ///< 1: not None, but it cannot be read, which is reported elsewhere

  friend auto operator<=>(const AbsentCopy&, const AbsentCopy&) = default;
};

/// Parameters that the reference sums as one: of one mesh object and with the same placements of the parameter, or
/// plain.
struct ShardGroup {
  std::optional<std::size_t> mesh;  ///< empty: plain tensors
  std::vector<Placement> placements;
};

/// What one recorded rank adds to one group. Trivially copyable.
struct RankGroupSum {
  std::int32_t rank = 0;
  std::uint32_t group = 0;
  TensorStatistics statistics;
};

/// What torch.nn.utils.clip_grad_norm_ makes of one recorded rank's plain tensors. Trivially copyable.
struct RankTorchSum {
  std::int32_t rank = 0;
  DType dtype = DType::bfloat16;  ///< of the stacked norms
  bool any = false;
  bool nan = false;
  bool inf = false;
  double largest = 0.0;
  ScaledSum powers;  ///< of the norms, each rounded to its tensor's type
};

struct ShardSums {
  std::vector<TensorStatistics> parameters;  ///< by parameter; Partial ones are left empty here
  std::vector<TensorStatistics> addends;     ///< by parameter: of the counted addends of Partial ones
  std::vector<std::uint32_t> none;           ///< by parameter: ranks whose gradient was None
  std::vector<ShardGroup> groups;
  std::vector<std::uint32_t> group_of;               ///< by parameter
  std::vector<RankGroupSum> rank_sums;               ///< of all recorded ranks, ascending
  std::vector<RankTorchSum> torch_sums;              ///< of all recorded ranks, ascending
  std::vector<Suspect> suspects;                     ///< ascending
  std::vector<ShardResult> tied;                     ///< every shard of tied parameters, by parameter and rank
  std::vector<AbsentCopy> absent;                    ///< ascending
  std::vector<std::uint32_t> uncovered;              ///< parameters whose slices hold elements twice or not at all
  std::vector<NoneShard> none_shards;                ///< of this process's recorded ranks
  std::map<std::int32_t, TensorStatistics> counted;  ///< by recorded rank: what counts there, without Partial gradients
};

/// A copy that counts in the place of one that is None. Trivially copyable.
struct StandIn {
  std::uint32_t parameter = 0;
  std::int32_t rank = 0;
  TensorStatistics statistics;
};

/// Collective; every process gets the same sums (but for none_shards).
/// @param by_object  whether groups are told apart by mesh object, as the reference does: it matters to roundings
/// alone, and
///                   a job can have as many objects as parameters
/// @param histograms  also counts the elements; null: nobody does
[[nodiscard]] ShardSums sum_shards(Run& run, const ParameterFactors& factors, NormOrder order, bool by_object,
                                   HistogramCollector* histograms = nullptr);

/// Sums of the reference's own terms: each recorded rank and group with its normalizer. Reads the gradients once more.
/// @param normalizer_of  the largest magnitude that the reference divides by
[[nodiscard]] std::vector<RankGroupSum> sum_reference_terms(
    Run& run, const ParameterFactors& factors, NormOrder order, const ShardSums& sums,
    const std::function<double(std::int32_t rank, std::uint32_t group)>& normalizer_of);

/// PyTorch's promotion of two gradients' types.
[[nodiscard]] DType promoted(DType a, DType b) noexcept;

/// A number rounded to a type and back, and an element in host memory as a number: for the few places that work on
/// single values outside a backend.
[[nodiscard]] double round_through(DType dtype, double value);
[[nodiscard]] double widen_through(DType dtype, const std::byte* element);

/// Row-major position of global coordinates, and back.
[[nodiscard]] std::uint64_t global_position(std::span<const std::int64_t> shape, std::span<const std::int64_t> index);
[[nodiscard]] std::vector<std::int64_t> index_at(std::span<const std::int64_t> shape, std::uint64_t position);

}  // namespace gradclip
