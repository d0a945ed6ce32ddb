#pragma once
// A model on a mesh: which rank holds what, as the training frameworks would cut it.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradclip/dump/manifest.hpp"
#include "gradclip/synth/model.hpp"

namespace gradclip {

/// Sizes of the job's mesh by dimension, in its order.
using MeshSizes = std::vector<std::pair<std::string, std::int64_t>>;

/// "pp=2,dp_shard=2,tp=2". Dimensions are pp, dp, dp_replicate, dp_shard, cp, tp, each at most once, and ep, which is
/// no dimension of its own: experts are on a mesh of ep_shard × ep over the same ranks of a stage. Errors: Error(usage)
/// for anything else, and where ep does not divide the ranks of a stage.
[[nodiscard]] MeshSizes parse_mesh_sizes(std::string_view text);

/// The manifest of the model's gradients on that mesh, of one type, without files:
///   pp            stages with equal shares of the layers, in order, each on a sub-mesh
///   dp_shard      FSDP2: the first dimension, after what tp cut of it (_StridedShard)
///   tp            the dimension that the description names, else copies
///   ep            experts: Shard(0) on ep, Shard(1) on ep_shard
///   all others    copies
/// Its state is before_clip: layouts of one model have one total.
/// @param layers  of the model's, at most
/// Errors: Error(usage) for more stages than layers, and for more ranks than a dump may have.
[[nodiscard]] Manifest synthetic_manifest(const ModelDescription& model, std::int64_t layers, const MeshSizes& mesh,
                                          DType dtype);

}  // namespace gradclip
