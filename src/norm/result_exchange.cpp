#include "gradclip/norm/result_exchange.hpp"

#include <algorithm>
#include <span>
#include <tuple>

namespace gradclip {
namespace {

constexpr std::size_t kLeastBytes = std::size_t{64} << 20;
constexpr std::size_t kHeldTwice = 2 * sizeof(ShardResult);  // sent and received

/// Of these recorded ranks, how many the process with most of them has.
std::size_t most_of_a_process(const WorkPlan& plan, std::span<const std::int32_t> ranks) {
  std::vector<std::size_t> counts(static_cast<std::size_t>(plan.processes()), 0);
  std::size_t most = 0;
  for (const std::int32_t rank : ranks)
    most = std::max(most, ++counts[static_cast<std::size_t>(plan.process_of(rank))]);
  return most;
}

}  // namespace

std::vector<ParameterRange> exchange_ranges(const Manifest& manifest, const WorkPlan& plan, std::size_t bytes) {
  std::vector<std::size_t> of_mesh;
  for (const DeviceMesh& mesh : manifest.meshes) of_mesh.push_back(most_of_a_process(plan, mesh.ranks()));
  const std::size_t most = bytes / kHeldTwice;
  std::vector<ParameterRange> ranges;
  std::size_t begin = 0, held = 0;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const ParameterEntry& entry = manifest.parameters[p];
    const std::size_t results = entry.mesh ? of_mesh[*entry.mesh] : most_of_a_process(plan, entry.ranks);
    if (held + results > most && p > begin) {
      ranges.push_back({begin, p});
      begin = p;
      held = 0;
    }
    held += results;
  }
  ranges.push_back({begin, manifest.parameters.size()});
  return ranges;
}

std::vector<ParameterRange> exchange_ranges(const Run& run) {
  return exchange_ranges(run.dump.manifest(), run.plan, std::max(run.stream.options().memory_budget / 4, kLeastBytes));
}

std::vector<ShardResult> exchange_results(Run& run, std::vector<ShardResult> results) {
  const auto by_parameter = [](const ShardResult& a, const ShardResult& b) {
    return std::pair(a.parameter, a.rank) < std::pair(b.parameter, b.rank);
  };
  const auto processes = static_cast<std::uint32_t>(run.comm.size());
  if (processes > 1) {
    std::vector<std::size_t> counts(processes, 0);
    for (const ShardResult& result : results) ++counts[result.parameter % processes];
    std::sort(results.begin(), results.end(), [processes](const ShardResult& a, const ShardResult& b) {
      return std::tuple(a.parameter % processes, a.parameter, a.rank) <
             std::tuple(b.parameter % processes, b.parameter, b.rank);
    });
    results = exchange_values(run.comm, std::move(results), counts);
  }
  std::sort(results.begin(), results.end(), by_parameter);
  return results;
}

}  // namespace gradclip
