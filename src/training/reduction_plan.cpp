#include "gradclip/training/reduction_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

[[noreturn]] void refuse_parameter(const ParameterEntry& entry, std::string found, std::string expected,
                                   std::string advice = {}) {
  throw Error(ExitCode::bad_input, {.where = "manifest.json, parameter " + quoted(entry.name),
                                    .found = std::move(found),
                                    .expected = std::move(expected),
                                    .advice = std::move(advice)});
}

DType reduce_type(const Manifest& manifest, const ParameterEntry& entry, const AccumulationTypes& given) {
  if (given.reduce) return *given.reduce;
  if (entry.reduce_dtype) return *entry.reduce_dtype;
  if (manifest.accumulation.reduce_dtype) return *manifest.accumulation.reduce_dtype;
  return entry.dtype == DType::float64 ? DType::float64 : DType::float32;
}

DType storage_type(const Manifest& manifest, const ParameterEntry& entry, const AccumulationTypes& given,
                   DType reduce) {
  if (given.storage) return *given.storage;
  if (entry.storage_dtype) return *entry.storage_dtype;
  return manifest.accumulation.storage_dtype.value_or(reduce);
}

void require_unreduced(const ParameterEntry& entry) {
  if (entry.ranks.size() == 1 || entry.copies == Copies::distinct) return;
  refuse_parameter(entry, fmt::format("a plain tensor on {} ranks", entry.ranks.size()),
                   "one rank, \"distinct\" ones, or a mesh that tells which ranks are averaged",
                   "give DDP's tensors a mesh of its ranks, placements Replicate(), gradient_placements Partial(avg)");
}

/// Whether the gradient is to be reduced along a mesh dimension.
bool varies_along(const ParameterEntry& entry, std::size_t d) {
  const Placement &recorded = entry.layout()[d], &kept = entry.placements[d];
  if (recorded.kind == Placement::Kind::flat || kept.kind == Placement::Kind::flat) {
    refuse_parameter(entry, "a flat shard", "shards of whole dimensions");
  }
  if (recorded == kept) return false;
  // What ends in addends is not reduced: an average that every rank then counts as one would be counted once for each.
  const bool reducible = recorded.kind == Placement::Kind::partial && kept.kind != Placement::Kind::partial &&
                         (recorded.operation == PartialOperation::avg || recorded.operation == PartialOperation::sum);
  if (reducible) return true;
  refuse_parameter(entry,
                   fmt::format("a gradient that is {} where the parameter is {}", to_string(recorded), to_string(kept)),
                   "Partial(avg) or Partial(sum), or the parameter's placement");
}

/// The collectives' groups: a sum that is no mean (DTensor's, which FSDP2 has finished before it averages), where the
/// parameter is sharded, where every rank keeps a copy.
std::array<GroupReduction, 3> group_dimensions(const DeviceMesh& mesh, const ParameterEntry& entry) {
  std::array<GroupReduction, 3> groups;
  for (GroupReduction& group : groups) group.dimensions.assign(mesh.dimensions(), false);
  const auto is_copy = [&](std::size_t d) { return entry.placements[d].kind == Placement::Kind::replicate; };
  bool scatters = false;
  const auto is_sum = [&](std::size_t d) { return entry.layout()[d].operation == PartialOperation::sum; };
  for (std::size_t d = 0; d < mesh.dimensions(); ++d) {
    scatters = scatters || (varies_along(entry, d) && !is_sum(d) && !is_copy(d));
  }
  for (std::size_t d = 0; d < mesh.dimensions(); ++d) {
    if (!varies_along(entry, d)) continue;
    // FSDP2 shards over the flattened dp_shard x cp, however the mesh spells it.
    const bool copied = is_copy(d) && !(scatters && mesh.dim_names()[d] == "cp");
    GroupReduction& group = groups[is_sum(d) ? 0 : copied ? 2 : 1];
    const auto size = static_cast<std::size_t>(mesh.shape()[d]);
    group.dimensions[d] = true;
    group.ranks *= size;
    if (!is_sum(d)) group.divisor *= static_cast<double>(size);
  }
  return groups;
}

bool divides_around(DType reduce) {
  return reduce == DType::float16 || reduce == DType::float64;
}

/// The rank at coordinate 0 of those of the reduced dimensions that `chosen` tells.
template <typename Chosen>
std::int32_t first_along(const ReductionPlan& plan, const Manifest& manifest, std::int32_t rank, const Chosen& chosen) {
  if (!plan.reduces()) return rank;
  const DeviceMesh& mesh = manifest.meshes[*plan.output.mesh];
  Coordinate at = mesh.coordinate(rank);
  for (const GroupReduction& group : plan.reductions) {
    for (std::size_t d = 0; d < at.size(); ++d) {
      if (group.dimensions[d] && chosen(d)) at[d] = 0;
    }
  }
  return mesh.rank_at(at);
}

}  // namespace

double division_before(double n) noexcept {
  double divisor = 1.0;
  while (std::fmod(n, divisor) == 0.0 && n / divisor > divisor) divisor *= 2.0;
  return divisor;
}

std::vector<std::int32_t> ReductionPlan::addends(const Manifest& manifest, std::int32_t rank) const {
  std::vector<std::int32_t> ranks{rank};
  for (auto group = reductions.rbegin(); group != reductions.rend(); ++group) {
    const DeviceMesh& mesh = manifest.meshes[*output.mesh];
    std::vector<std::int32_t> all;
    for (const std::int32_t one : ranks) {
      const std::vector<std::int32_t> along = mesh.ranks_along(group->dimensions, mesh.coordinate(one));
      all.insert(all.end(), along.begin(), along.end());
    }
    ranks = std::move(all);
  }
  return ranks;
}

std::int32_t ReductionPlan::first_addend(const Manifest& manifest, std::int32_t rank) const {
  return first_along(*this, manifest, rank, [](std::size_t) { return true; });
}

std::int32_t ReductionPlan::first_copy(const Manifest& manifest, std::int32_t rank) const {
  return first_along(*this, manifest, rank,
                     [this](std::size_t d) { return output.placements[d].kind == Placement::Kind::replicate; });
}

ReductionPlan plan_reduction(const Manifest& manifest, const ParameterEntry& entry, const AccumulationTypes& given) {
  ReductionPlan plan;
  plan.reduce = reduce_type(manifest, entry, given);
  plan.output = entry;
  plan.output.gradient_placements.reset();
  plan.output.dtype = storage_type(manifest, entry, given, plan.reduce);
  if (!entry.mesh) {
    require_unreduced(entry);
    return plan;
  }
  double averaged = 1.0;
  std::array<GroupReduction, 3> groups = group_dimensions(manifest.meshes[*entry.mesh], entry);
  for (GroupReduction& group : groups) {
    averaged *= group.divisor;
    if (divides_around(plan.reduce)) group.divisor = 1.0;
    if (std::find(group.dimensions.begin(), group.dimensions.end(), true) == group.dimensions.end()) continue;
    if (&group == &groups.front()) plan.sums = 1;
    plan.reductions.push_back(std::move(group));
  }
  if (divides_around(plan.reduce)) {
    plan.before = division_before(averaged);
    plan.after = averaged / plan.before;
  }
  return plan;
}

}  // namespace gradclip
