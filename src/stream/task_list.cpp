#include "gradclip/stream/task_list.hpp"

#include <algorithm>

namespace gradclip {

TaskList list_tasks(DumpReader& dump, ParameterRange parameters, std::span<const std::int32_t> ranks,
                    const FactorsOf& factors_of, std::optional<std::int64_t> model_part) {
  const Manifest& manifest = dump.manifest();
  TaskList list;
  std::vector<char> mesh_holds(manifest.meshes.size());
  for (const std::int32_t rank : ranks) {
    const std::shared_ptr<const RankFile> file = dump.rank_file(rank);
    for (std::size_t i = 0; i < manifest.meshes.size(); ++i) mesh_holds[i] = manifest.meshes[i].contains(rank);
    for (std::size_t p = parameters.begin; p < parameters.end; ++p) {
      const ParameterEntry& parameter = manifest.parameters[p];
      if (model_part && parameter.model_part != *model_part) continue;
      const bool holds = parameter.mesh ? mesh_holds[*parameter.mesh] != 0
                                        : std::binary_search(parameter.ranks.begin(), parameter.ranks.end(), rank);
      if (!holds) continue;
      const StoredShard& shard = file->locate(p);
      if (shard.none) {
        list.none.push_back({p, rank});
        continue;
      }
      ScaleFactors factors = factors_of(p, rank);
      if (shard.scale_inv) factors.scale_inv = *shard.scale_inv;
      list.factors.push_back(factors);
      const auto index = static_cast<std::uint32_t>(list.tasks.size());
      list.tasks.push_back({rank, p, file, &shard, index, parameter.model_part});
    }
  }
  return list;
}

}  // namespace gradclip
