#pragma once
// The total that each recorded rank would have used: who counts what, from its point of view (docs/arithmetic.md).

#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {

/// The reference from each rank's view: its parameters grouped by (mesh, the parameter's placements); a group summed
/// over its mesh's non-Replicate dimensions, plain tensors over nothing; a group with a Partial placement of the
/// parameter by its full tensors; groups combined; with pp, the rank's pipeline group combined. Tied weights count in
/// each stage. `sums` holds exact terms. With Numerics::automodel and automodel_cpu the gradients are read once more
/// for the reference's own terms. Numerics::torch is for plain tensors without pp (docs/arithmetic.md); the caller sees
/// to that. Collective; every process gets the same view.
[[nodiscard]] ReferenceView reference_view(Run& run, const ParameterFactors& factors, NormOrder order,
                                           Numerics numerics, const ShardSums& sums, const Absences& absences,
                                           const PipelineView& pipeline);

}  // namespace gradclip
