#pragma once
// How the gradients that ranks accumulated become a parameter's reduced gradient.

#include <cstdint>
#include <optional>
#include <vector>

#include "gradclip/dump/manifest.hpp"

namespace gradclip {

/// The types of a parameter's way; empty: as recorded, else the default.
struct AccumulationTypes {
  std::optional<DType> reduce;   ///< default: float32, or float64 for float64 gradients
  std::optional<DType> storage;  ///< default: the reduce type
};

/// One collective: the sum of `ranks` gradients, divided once.
struct GroupReduction {
  std::vector<bool> dimensions;  ///< of the mesh, along which the group's ranks vary
  std::size_t ranks = 1;
  double divisor = 1.0;
};

struct ReductionPlan {
  ParameterEntry output;  ///< as the output's manifest has it
  DType reduce = DType::float32;
  /// In their order: the sums that autograd left (Partial(sum), of tp), then over the dimensions along which the
  /// parameter is sharded (and cp), then over those along which it is replicated; each rounded to the reduce type.
  std::vector<GroupReduction> reductions;
  std::size_t sums = 0;  ///< 1: the first of them is autograd's, else 0
  double before = 1.0;   ///< what is divided by after `sums`, rounded to the reduce type; 1: nothing
  double after = 1.0;    ///< and the result at the end

  [[nodiscard]] bool reduces() const noexcept { return !reductions.empty(); }
  /// The ranks whose gradients make up this rank's: each group of the first reduction one after another, in coordinate
  /// order, then the groups' results in the next one's.
  [[nodiscard]] std::vector<std::int32_t> addends(const Manifest& manifest, std::int32_t rank) const;
  /// The first of them, which tells these addends from others.
  [[nodiscard]] std::int32_t first_addend(const Manifest& manifest, std::int32_t rank) const;
  /// The first of the ranks that keep the same slice of the same sum, which tells it from others.
  [[nodiscard]] std::int32_t first_copy(const Manifest& manifest, std::int32_t rank) const;
};

/// Reference: FSDP2 finishes a sum over tp, then reduce-scatters, then all-reduces. float32 and bfloat16: each of these
/// two averages. float16 and float64: both add, and what they would divide by is divided before and after
/// (division_before).
/// Errors: Error(bad_input) for placements that no reduction ends in: Flat, another reduction than sum and avg, plain
/// tensors whose ranks were to be reduced.
[[nodiscard]] ReductionPlan plan_reduction(const Manifest& manifest, const ParameterEntry& entry,
                                           const AccumulationTypes& given);

/// FSDP2's first divisor of float16 and float64: the smallest power of two that is at least the root of n, or the first
/// on the way to it that does not divide n. @pre n >= 1
[[nodiscard]] double division_before(double n) noexcept;

}  // namespace gradclip
