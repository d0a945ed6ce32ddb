#pragma once
// A model of five parameters on two pipeline stages, measured by hand.

#include <cmath>
#include <limits>

#include "gradclip/clip/clip.hpp"
#include "gradclip/dump/manifest.hpp"

namespace gradclip {

inline Manifest small_manifest() {
  Manifest manifest;
  manifest.step = 7;
  manifest.world_size = 4;
  manifest.meshes.emplace_back("world", std::vector<std::string>{"pp", "dp"}, std::vector<std::int64_t>{2, 2},
                               std::vector<std::int32_t>{0, 1, 2, 3});
  manifest.meshes.emplace_back("stage0", std::vector<std::string>{"dp"}, std::vector<std::int64_t>{2},
                               std::vector<std::int32_t>{0, 1});
  manifest.meshes.emplace_back("stage1", std::vector<std::string>{"dp"}, std::vector<std::int64_t>{2},
                               std::vector<std::int32_t>{2, 3});
  manifest.device_mesh = 0;
  const Placement shard{.kind = Placement::Kind::shard};
  const Placement replicate{.kind = Placement::Kind::replicate};
  const auto add = [&](std::string name, std::vector<std::int64_t> shape, DType dtype, std::optional<std::size_t> mesh,
                       std::vector<Placement> placements) -> ParameterEntry& {
    ParameterEntry& entry = manifest.parameters.emplace_back();
    entry.name = name;
    entry.dataset = name;
    entry.shape = shape;
    entry.elements = 1;
    for (const std::int64_t extent : shape) entry.elements *= static_cast<std::uint64_t>(extent);
    entry.dtype = dtype;
    entry.mesh = mesh;
    entry.placements = placements;
    return entry;
  };
  add("embed", {4, 2}, DType::float32, 1, {shard}).tied = "embed";
  add("norm", {3}, DType::float32, 1, {replicate});
  add("up", {2, 2}, DType::bfloat16, 2, {shard}).model_part = 1;
  add("head", {4, 2}, DType::float32, 2, {shard}).tied = "embed";
  ParameterEntry& plain = add("bias", {2}, DType::float32, std::nullopt, {});
  plain.ranks = {2, 3};
  plain.copies = Copies::distinct;
  manifest.training.grad_norm = 13.0;
  return manifest;
}

inline TensorStatistics with_norm(double norm, std::uint64_t elements) {
  TensorStatistics statistics;
  statistics.elements = elements;
  statistics.max_abs = norm;
  statistics.min_abs = norm / 2;
  statistics.powers = {norm * norm, 0};
  statistics.signed_sum = {norm, 0};
  return statistics;
}

/// Norms 3, 4, 12, (3), 0: total 13.
inline ClipResult small_result() {
  NormResult norm;
  norm.order = NormOrder{2.0};
  norm.total = 13.0;
  const double norms[] = {3.0, 4.0, 12.0, 3.0, 0.0};
  const std::uint64_t elements[] = {8, 3, 4, 8, 4};
  for (std::size_t i = 0; i < 5; ++i) {
    ParameterNorm parameter;
    parameter.statistics = with_norm(norms[i], elements[i]);
    parameter.norm = norms[i];
    parameter.share = norms[i] * norms[i] / 169.0;
    norm.parameters.push_back(parameter);
  }
  norm.parameters[3].counted = false;
  norm.parameters[3].share = 0.0;
  norm.parameters[4].statistics.min_abs = std::numeric_limits<double>::infinity();
  norm.parameters[4].statistics.zeros = 4;
  for (const std::size_t i : {0u, 1u, 2u, 4u}) add(norm.statistics, norm.parameters[i].statistics, norm.order);
  norm.reference.arithmetic = "exact";
  norm.reference.totals = {{.total = 13.0, .ranks = {0, 1, 2, 3}}};

  ClipResult result;
  result.norm = std::move(norm);
  result.order = NormOrder{2.0};
  result.total = 13.0;
  result.max_norm = 6.5;
  result.coefficient = clip_coefficient(13.0, 6.5);
  result.clipped = true;
  result.total_after = 6.5;
  result.scale.label_token_divisor = 4.0;
  result.scale.explanation = "all gradients / 4";
  result.scale.factors.expert = std::vector<bool>(5, false);
  return result;
}

}  // namespace gradclip
