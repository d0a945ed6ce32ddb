#include "gradclip/norm/coverage_check.hpp"

#include <span>

#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {

void CoverageCheck::add(const ShardTask& task) {
  const ParameterEntry& entry = manifest_.parameters[task.parameter];
  const bool flat = !entry.flat_ranges.empty();
  if (!flat && !task.shard->own_slice) return;
  if (!is_counted_copy(manifest_, entry, task.rank, expert_[task.parameter])) return;
  Coverage& held = held_[static_cast<std::uint32_t>(task.parameter)];
  held += Coverage(task.shard->layout);
  if (!flat) held -= Coverage(manifest_.layout(entry, task.rank));
}

Coverage CoverageCheck::expected(const ParameterEntry& entry) const {
  if (entry.flat_ranges.empty()) return {};
  std::uint64_t times = 1;  // addends lie one over another
  for (std::size_t d = 0; d < entry.layout().size(); ++d) {
    const bool partial = entry.layout()[d].kind == Placement::Kind::partial;
    if (partial) times *= static_cast<std::uint64_t>(manifest_.meshes[*entry.mesh].shape()[d]);
  }
  return Coverage(whole_layout(entry.shape)).times(times);
}

std::vector<std::uint32_t> CoverageCheck::uncovered(Communicator& comm) const {
  struct Part {
    std::uint32_t parameter;
    Coverage held;
  };
  std::vector<Part> mine;
  for (const auto& [parameter, held] : held_) mine.push_back({parameter, held});
  std::map<std::uint32_t, Coverage> all;
  for (const Part& part : gather_values(comm, std::span<const Part>(mine))) all[part.parameter] += part.held;
  std::vector<std::uint32_t> uncovered;
  for (const auto& [parameter, held] : all) {
    if (held != expected(manifest_.parameters[parameter])) uncovered.push_back(parameter);
  }
  return uncovered;
}

}  // namespace gradclip
