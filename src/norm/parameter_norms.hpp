#pragma once
// Norms of parts of a model: parameters that belong together, and what they add to the total.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/dump/manifest.hpp"
#include "gradclip/norm/total_norm.hpp"

namespace gradclip {

/// Parameters of one mesh with equal placements: what the reference reduces together. Grouped by the parameter's own
/// placements, as there, not by the gradient's.
struct ShardingGroup {
  std::optional<std::size_t> mesh;      ///< index into Manifest::meshes; empty: plain tensors
  std::vector<Placement> placements;    ///< one per mesh dimension
  std::vector<std::size_t> parameters;  ///< indices into Manifest::parameters, ascending
};

/// Parameters of one pipeline stage: those whose holders have the same coordinate on the pipeline axis of the device
/// mesh.
struct PipelineStage {
  std::optional<std::int64_t> stage;      ///< that coordinate; empty: held outside the device mesh
  std::vector<std::int64_t> model_parts;  ///< that occur in it, ascending
  std::vector<std::size_t> parameters;
};

/// Parameters whose gradients have one type.
struct TypeGroup {
  DType dtype = DType::float32;
  std::vector<std::size_t> parameters;
};

/// In the order of their first parameters. O(parameters).
[[nodiscard]] std::vector<ShardingGroup> sharding_groups(const Manifest& manifest);

/// In ascending order, parameters without a stage last. Without a device mesh, or without that axis in it, the whole
/// model is stage 0. A parameter whose holders span several stages (a plain tensor on all ranks) belongs to the first
/// of them. O(parameters + ranks of all meshes and plain tensors).
[[nodiscard]] std::vector<PipelineStage> pipeline_stages(const Manifest& manifest, std::string_view pp_axis_name);

/// In the order of their first parameters.
[[nodiscard]] std::vector<TypeGroup> type_groups(const Manifest& manifest);

/// Norm of some parameters together, from their sums of powers.
struct GroupNorm {
  TensorStatistics statistics;  ///< of the counted elements: later entries of a tied weight add nothing
  double norm = 0.0;
  double share = 0.0;  ///< norm^p / total^p; NaN if the total is not finite, 0 if nothing was counted
};

/// @param parameters  ascending indices; added in this order.
[[nodiscard]] GroupNorm norm_of(const NormResult& result, std::span<const std::size_t> parameters);

/// One entry per group, in their order.
[[nodiscard]] std::vector<GroupNorm> group_norms(const NormResult& result, const std::vector<ShardingGroup>& groups);
[[nodiscard]] std::vector<GroupNorm> stage_norms(const NormResult& result, const std::vector<PipelineStage>& stages);
[[nodiscard]] std::vector<GroupNorm> dtype_norms(const NormResult& result, const std::vector<TypeGroup>& groups);

}  // namespace gradclip
