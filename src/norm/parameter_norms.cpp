#include "gradclip/norm/parameter_norms.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>
#include <utility>

namespace gradclip {
namespace {

/// Pipeline coordinate of every recorded rank; -1 outside the device mesh. Empty: there is no pipeline axis.
std::vector<std::int32_t> stage_by_rank(const Manifest& manifest, std::string_view pp_axis_name) {
  if (!manifest.device_mesh) return {};
  const DeviceMesh& mesh = manifest.meshes[*manifest.device_mesh];
  const std::optional<std::size_t> axis = mesh.dimension(pp_axis_name);
  if (!axis) return {};
  std::int64_t stride = 1;
  for (std::size_t d = *axis + 1; d < mesh.dimensions(); ++d) stride *= mesh.shape()[d];
  std::vector<std::int32_t> stages(static_cast<std::size_t>(manifest.world_size), -1);
  for (std::size_t i = 0; i < mesh.ranks().size(); ++i) {
    const std::int64_t coordinate = static_cast<std::int64_t>(i) / stride % mesh.shape()[*axis];
    stages[static_cast<std::size_t>(mesh.ranks()[i])] = static_cast<std::int32_t>(coordinate);
  }
  return stages;
}

std::optional<std::int64_t> first_stage(const std::vector<std::int32_t>& stages, std::span<const std::int32_t> ranks) {
  std::optional<std::int64_t> first;
  for (const std::int32_t rank : ranks) {
    const std::int32_t stage = stages[static_cast<std::size_t>(rank)];
    if (stage >= 0 && (!first || stage < *first)) first = stage;
  }
  return first;
}

template <class Group>
std::vector<GroupNorm> norms_of_all(const NormResult& result, const std::vector<Group>& groups) {
  std::vector<GroupNorm> norms;
  norms.reserve(groups.size());
  for (const Group& group : groups) norms.push_back(norm_of(result, group.parameters));
  return norms;
}

}  // namespace

std::vector<ShardingGroup> sharding_groups(const Manifest& manifest) {
  std::vector<ShardingGroup> groups;
  std::unordered_map<std::string, std::size_t> known;
  for (std::size_t i = 0; i < manifest.parameters.size(); ++i) {
    const ParameterEntry& parameter = manifest.parameters[i];
    const std::string key =
        parameter.mesh ? std::to_string(*parameter.mesh) + ' ' + to_string(parameter.placements) : std::string();
    const auto [entry, inserted] = known.emplace(key, groups.size());
    if (inserted) groups.push_back({parameter.mesh, parameter.placements, {}});
    groups[entry->second].parameters.push_back(i);
  }
  return groups;
}

std::vector<PipelineStage> pipeline_stages(const Manifest& manifest, std::string_view pp_axis_name) {
  const std::vector<std::int32_t> stages = stage_by_rank(manifest, pp_axis_name);
  std::vector<std::optional<std::int64_t>> stage_of_mesh(manifest.meshes.size(), 0);
  if (!stages.empty()) {
    for (std::size_t m = 0; m < manifest.meshes.size(); ++m) {
      stage_of_mesh[m] = first_stage(stages, manifest.meshes[m].ranks());
    }
  }
  std::map<std::int64_t, PipelineStage> by_stage;
  PipelineStage outside;
  for (std::size_t i = 0; i < manifest.parameters.size(); ++i) {
    const ParameterEntry& parameter = manifest.parameters[i];
    std::optional<std::int64_t> stage = 0;
    if (parameter.mesh) {
      stage = stage_of_mesh[*parameter.mesh];
    } else if (!stages.empty()) {
      stage = first_stage(stages, parameter.ranks);
    }
    PipelineStage& entry = stage ? by_stage[*stage] : outside;
    entry.stage = stage;
    entry.parameters.push_back(i);
    entry.model_parts.push_back(parameter.model_part);
  }
  std::vector<PipelineStage> result;
  for (auto& [stage, entry] : by_stage) result.push_back(std::move(entry));
  if (!outside.parameters.empty()) result.push_back(std::move(outside));
  for (PipelineStage& entry : result) {
    std::sort(entry.model_parts.begin(), entry.model_parts.end());
    entry.model_parts.erase(std::unique(entry.model_parts.begin(), entry.model_parts.end()), entry.model_parts.end());
  }
  return result;
}

std::vector<TypeGroup> type_groups(const Manifest& manifest) {
  std::vector<TypeGroup> groups;
  for (std::size_t i = 0; i < manifest.parameters.size(); ++i) {
    const DType dtype = manifest.parameters[i].dtype;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const TypeGroup& g) { return g.dtype == dtype; });
    if (group == groups.end()) group = groups.insert(groups.end(), TypeGroup{dtype, {}});
    group->parameters.push_back(i);
  }
  return groups;
}

GroupNorm norm_of(const NormResult& result, std::span<const std::size_t> parameters) {
  GroupNorm group;
  for (const std::size_t index : parameters) {
    const ParameterNorm& parameter = result.parameters[index];
    if (parameter.counted) add(group.statistics, parameter.statistics, result.order);
  }
  group.norm = group.statistics.norm(result.order);
  group.share = share_of(group.norm, result.total, result.order);
  return group;
}

std::vector<GroupNorm> group_norms(const NormResult& result, const std::vector<ShardingGroup>& groups) {
  return norms_of_all(result, groups);
}

std::vector<GroupNorm> stage_norms(const NormResult& result, const std::vector<PipelineStage>& stages) {
  return norms_of_all(result, stages);
}

std::vector<GroupNorm> dtype_norms(const NormResult& result, const std::vector<TypeGroup>& groups) {
  return norms_of_all(result, groups);
}

}  // namespace gradclip
