#include "gradclip/stream/work_plan.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

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

/// Of each recorded rank, value_of(parameter) over the parameters that it holds.
template <class ValueOf>
std::vector<double> sums_by_rank(const Manifest& manifest, const ValueOf& value_of) {
  std::vector<double> sums(static_cast<std::size_t>(manifest.world_size), 0.0);
  std::vector<double> by_mesh(manifest.meshes.size(), 0.0);
  for (const ParameterEntry& parameter : manifest.parameters) {
    const double value = value_of(parameter);
    if (parameter.mesh) {
      by_mesh[*parameter.mesh] += value;
    } else {
      for (const std::int32_t rank : parameter.ranks) sums[static_cast<std::size_t>(rank)] += value;
    }
  }
  for (std::size_t i = 0; i < by_mesh.size(); ++i) {
    for (const std::int32_t rank : manifest.meshes[i].ranks()) sums[static_cast<std::size_t>(rank)] += by_mesh[i];
  }
  return sums;
}

}  // namespace

WorkPlan::WorkPlan(std::vector<int> process_of, int processes)
    : process_of_(std::move(process_of)), ranks_(process_of_.size()), first_(static_cast<std::size_t>(processes) + 1) {
  for (const int process : process_of_) ++first_[static_cast<std::size_t>(process) + 1];
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  std::vector<std::size_t> next(first_.begin(), first_.end() - 1);
  for (std::size_t rank = 0; rank < process_of_.size(); ++rank) {
    ranks_[next[static_cast<std::size_t>(process_of_[rank])]++] = static_cast<std::int32_t>(rank);
  }
}

std::vector<double> bytes_by_rank(const Manifest& manifest) {
  return sums_by_rank(manifest, [&](const ParameterEntry& parameter) {
    return elements_per_rank(manifest, parameter) * static_cast<double>(size_of(parameter.dtype));
  });
}

std::size_t most_parameters_of_a_rank(const Manifest& manifest) {
  const std::vector<double> counts = sums_by_rank(manifest, [](const ParameterEntry&) { return 1.0; });
  return counts.empty() ? 0 : static_cast<std::size_t>(*std::max_element(counts.begin(), counts.end()));
}

WorkPlan plan_work(const Manifest& manifest, int processes) {
  // A rank without gradients still costs the opening of its file.
  std::vector<double> cost = bytes_by_rank(manifest);
  for (double& rank : cost) rank += 1.0;
  double total = 0.0;
  for (const double rank : cost) total += rank;

  std::vector<int> process_of(cost.size(), 0);
  std::size_t rank = 0;
  double before = 0.0;
  for (int process = 0; process < processes; ++process) {
    const double share = process + 1 == processes ? HUGE_VAL : total * (process + 1) / processes;
    while (rank < cost.size() && before + cost[rank] / 2 < share) {
      before += cost[rank];
      process_of[rank++] = process;
    }
  }
  return {std::move(process_of), processes};
}

WorkPlan plan_work(const Manifest& manifest, const RankSight& sight) {
  const auto world = static_cast<std::size_t>(manifest.world_size);
  const auto processes = static_cast<int>(sight.view_of.size());
  const bool all_see_all = std::all_of(sight.view_of.begin(), sight.view_of.end(),
                                       [&](std::size_t view) { return sight.views[view].size() == world; });
  if (all_see_all) return plan_work(manifest, processes);

  std::vector<std::vector<int>> seers(sight.views.size());
  for (int process = 0; process < processes; ++process) {
    seers[sight.view_of[static_cast<std::size_t>(process)]].push_back(process);
  }
  std::vector<std::vector<std::size_t>> views_of(world);
  std::vector<std::size_t> seen_by(world, 0);
  for (std::size_t view = 0; view < sight.views.size(); ++view) {
    for (const std::int32_t rank : sight.views[view]) {
      views_of[static_cast<std::size_t>(rank)].push_back(view);
      seen_by[static_cast<std::size_t>(rank)] += seers[view].size();
    }
  }
  std::vector<std::size_t> order(world);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return seen_by[a] < seen_by[b]; });

  const std::vector<double> cost = bytes_by_rank(manifest);
  std::vector<double> load(sight.view_of.size(), 0.0);
  std::vector<int> process_of(world, 0);
  for (const std::size_t rank : order) {
    int least = -1;
    for (const std::size_t view : views_of[rank]) {
      for (const int process : seers[view]) {
        const auto i = static_cast<std::size_t>(process);
        if (least < 0 || load[i] < load[static_cast<std::size_t>(least)]) least = process;
      }
    }
    process_of[rank] = least;
    load[static_cast<std::size_t>(least)] += cost[rank] + 1.0;
  }
  return {std::move(process_of), processes};
}

}  // namespace gradclip
