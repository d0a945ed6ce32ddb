#pragma once
// Which ranks' addends make up a gradient with Partial dimensions, and in which order they become one value.

#include <cstdint>
#include <vector>

#include "gradclip/dump/manifest.hpp"
#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {

/// One reduction step, from the last Partial dimension to the first; equal operations in a row are one step over all of
/// their addends.
struct ReductionStep {
  PartialOperation operation = PartialOperation::sum;
  std::size_t fan_in = 1;
};

/// How the addends of a Partial gradient, in coordinate order, become one value.
[[nodiscard]] std::vector<ReductionStep> reduction_steps(const DeviceMesh& mesh,
                                                         const std::vector<Placement>& placements);

/// One slice of a Partial parameter: the ranks whose addends make it up.
struct PartialSlice {
  std::size_t parameter = 0;
  std::vector<std::int32_t> addends;  ///< in coordinate order; where one is None, the rank of a copy that is not
  ShardLayout layout;
};

/// In manifest order, within a parameter in rank order of the first addend: the same on every process. Without slices
/// of which every addend is None.
/// @param of_gradients  whether gradients have to be Partial, as recorded; else the parameters themselves
[[nodiscard]] std::vector<PartialSlice> partial_slices(const Manifest& manifest, const Absences& absences,
                                                       bool of_gradients);

}  // namespace gradclip
