#include "gradclip/norm/partial_slices.hpp"

#include <algorithm>

namespace gradclip {
namespace {

bool has_partial_placement(const ParameterEntry& parameter) {
  return std::any_of(parameter.placements.begin(), parameter.placements.end(),
                     [](const Placement& placement) { return placement.kind == Placement::Kind::partial; });
}

/// Whether the rank is at coordinate 0 of every Replicate and Partial dimension.
bool begins_slice(const Manifest& manifest, const ParameterEntry& entry, std::int32_t rank) {
  const Coordinate at = manifest.meshes[*entry.mesh].coordinate(rank);
  const std::vector<Placement>& placements = entry.layout();
  for (std::size_t d = 0; d < at.size(); ++d) {
    const Placement::Kind kind = placements[d].kind;
    if (at[d] != 0 && (kind == Placement::Kind::replicate || kind == Placement::Kind::partial)) return false;
  }
  return true;
}

}  // namespace

std::vector<ReductionStep> reduction_steps(const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  std::vector<ReductionStep> steps;
  for (std::size_t d = placements.size(); d-- > 0;) {
    if (placements[d].kind != Placement::Kind::partial) continue;
    const auto extent = static_cast<std::size_t>(mesh.shape()[d]);
    if (!steps.empty() && steps.back().operation == placements[d].operation) {
      steps.back().fan_in *= extent;
    } else {
      steps.push_back({placements[d].operation, extent});
    }
  }
  return steps;
}

std::vector<PartialSlice> partial_slices(const Manifest& manifest, const Absences& absences, bool of_gradients) {
  std::vector<PartialSlice> slices;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const ParameterEntry& entry = manifest.parameters[p];
    if (of_gradients ? !entry.has_partial() : !has_partial_placement(entry)) continue;
    for (const std::int32_t rank : manifest.holders(entry)) {
      if (!begins_slice(manifest, entry, rank)) continue;
      std::vector<std::int32_t> addends = manifest.role(entry, rank, /*expert=*/false).addends;
      bool any = false;
      for (std::int32_t& addend : addends) {
        addend = absences.counted(p, addend);
        any = any || !absences.is_none(p, addend);
      }
      if (any) slices.push_back({p, std::move(addends), manifest.layout(entry, rank)});
    }
  }
  return slices;
}

}  // namespace gradclip
