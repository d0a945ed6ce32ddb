#include "gradclip/stream/work_plan.hpp"

#include <algorithm>
#include <cmath>

namespace gradclip {
namespace {

/// Elements of one shard, as if the parameter divided evenly.
double elements_per_rank(const Manifest& manifest, const ParameterEntry& parameter) {
  double elements = static_cast<double>(parameter.elements);
  if (!parameter.mesh) return elements;
  const DeviceMesh& mesh = manifest.meshes[*parameter.mesh];
  const std::vector<Placement>& placements = parameter.layout();
  for (std::size_t d = 0; d < placements.size(); ++d) {
    const bool splits =
        placements[d].kind != Placement::Kind::replicate && placements[d].kind != Placement::Kind::partial;
    if (splits) elements /= static_cast<double>(mesh.shape()[d]);
  }
  return elements;
}

}  // namespace

int WorkPlan::process_of(std::int32_t rank) const noexcept {
  const auto after = std::upper_bound(first_rank_.begin(), first_rank_.end(), rank);
  return static_cast<int>(after - first_rank_.begin()) - 1;
}

std::int32_t WorkPlan::most_ranks() const noexcept {
  std::int32_t most = 0;
  for (int process = 0; process < processes(); ++process) most = std::max(most, end(process) - begin(process));
  return most;
}

std::vector<double> bytes_by_rank(const Manifest& manifest) {
  std::vector<double> bytes(static_cast<std::size_t>(manifest.world_size), 0.0);
  std::vector<double> by_mesh(manifest.meshes.size(), 0.0);
  for (const ParameterEntry& parameter : manifest.parameters) {
    const double shard = elements_per_rank(manifest, parameter) * static_cast<double>(size_of(parameter.dtype));
    if (parameter.mesh) {
      by_mesh[*parameter.mesh] += shard;
    } else {
      for (const std::int32_t rank : parameter.ranks) bytes[static_cast<std::size_t>(rank)] += shard;
    }
  }
  for (std::size_t i = 0; i < by_mesh.size(); ++i) {
    for (const std::int32_t rank : manifest.meshes[i].ranks()) bytes[static_cast<std::size_t>(rank)] += by_mesh[i];
  }
  return bytes;
}

WorkPlan plan_work(const Manifest& manifest, int processes) {
  // A rank without gradients still costs the opening of its file.
  std::vector<double> cost = bytes_by_rank(manifest);
  for (double& rank : cost) rank += 1.0;
  double total = 0.0;
  for (const double rank : cost) total += rank;

  std::vector<std::int32_t> first(static_cast<std::size_t>(processes) + 1, 0);
  first.back() = manifest.world_size;
  std::int32_t rank = 0;
  double before = 0.0;
  for (int process = 1; process < processes; ++process) {
    const double share = total * process / processes;
    while (rank < manifest.world_size && before + cost[static_cast<std::size_t>(rank)] / 2 < share) {
      before += cost[static_cast<std::size_t>(rank++)];
    }
    first[static_cast<std::size_t>(process)] = rank;
  }
  return WorkPlan(std::move(first));
}

}  // namespace gradclip
