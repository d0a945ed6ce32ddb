#include "gradclip/analysis/merged_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>
#include <set>

#include "gradclip/analysis/only_names.hpp"
#include "gradclip/base/element.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kSightsPerExchange = std::size_t{1} << 16;

/// What some of a tensor's shards are. Trivially copyable: it travels.
struct Sight {
  float scale_inv = 1.0F;
  std::uint16_t values = 0;  ///< 1: a gradient that is not None was seen
  std::uint16_t mixed = 0;   ///< 1: with more than one scale_inv
};

void add(Sight& to, const Sight& next) {
  if (next.values == 0) return;
  if (to.values == 0) {
    to = next;
    return;
  }
  const bool same = std::bit_cast<std::uint32_t>(to.scale_inv) == std::bit_cast<std::uint32_t>(next.scale_inv);
  if (!same || next.mixed != 0) to.mixed = 1;
}

/// The sights of all processes together. Collective.
std::vector<Sight> gathered(Communicator& comm, const std::vector<Sight>& mine) {
  std::vector<Sight> all(mine.size());
  for (std::size_t begin = 0; begin < mine.size(); begin += kSightsPerExchange) {
    const std::size_t count = std::min(kSightsPerExchange, mine.size() - begin);
    const std::vector<Sight> some = gather_values(comm, std::span<const Sight>(mine.data() + begin, count));
    for (std::size_t i = 0; i < some.size(); ++i) add(all[begin + i % count], some[i]);
  }
  return all;
}

DType written_as(const MergedTensor& tensor, const Sight& sight, MergeFormat format) {
  const DType dtype = tensor.tensor.dtype;
  if (!is_float8(dtype)) return dtype;
  const bool scaled = sight.mixed != 0 || (format == MergeFormat::safetensors && sight.scale_inv != 1.0F);
  return scaled || !tensor.tensor.steps.empty() ? DType::float32 : dtype;
}

/// Names of a safetensors file, which are unique.
void name_for_safetensors(const Manifest& manifest, std::vector<MergedTensor>& tensors) {
  std::set<std::string> taken;
  std::map<std::pair<std::string, std::string>, std::size_t> tied;  // the tensor that is written, by name and key
  for (const MergedTensor& tensor : tensors) taken.insert(tensor.name);
  std::set<std::string> used;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    MergedTensor& tensor = tensors[t];
    const ParameterEntry& entry = manifest.parameters[tensor.tensor.parameter];
    if (tensor.none) continue;
    if (entry.tied) {
      const auto [earlier, is_first] = tied.emplace(std::pair(entry.name, *entry.tied), t);
      if (!is_first) {
        tensor.stand_in = earlier->second;
        continue;
      }
    }
    if (used.insert(tensor.name).second) continue;
    std::string name;
    for (std::size_t i = 2; name.empty() || !taken.insert(name).second; ++i)
      name = fmt::format("{}@{}", tensor.name, i);
    used.insert(name);
    tensor.name = std::move(name);
  }
  // Those that are None on every rank, where another entry of the weight is not.
  for (MergedTensor& tensor : tensors) {
    const ParameterEntry& entry = manifest.parameters[tensor.tensor.parameter];
    if (!tensor.none || !entry.tied) continue;
    if (const auto other = tied.find({entry.name, *entry.tied}); other != tied.end()) tensor.stand_in = other->second;
  }
}

/// Links of one rank file, as gradclip_record.py makes them for entries of one name: no encoded name holds %40.
void name_datasets(const Manifest& manifest, std::vector<MergedTensor>& tensors) {
  std::set<std::string> used;
  for (MergedTensor& tensor : tensors) {
    const ParameterEntry& entry = manifest.parameters[tensor.tensor.parameter];
    tensor.dataset = entry.dataset;
    for (std::size_t i = 1; !used.insert(tensor.dataset).second; ++i) {
      tensor.dataset = fmt::format("{}%40{}", link_name(entry.name), i);
    }
  }
}

}  // namespace

MergePlan plan_merge(DiffRun& run, const NamePattern* only, MergeFormat format) {
  DumpReader& dump = *run.dumps[0];
  const Manifest& manifest = dump.manifest();
  MergePlan plan;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const ParameterEntry& entry = manifest.parameters[p];
    if (only != nullptr && !only->matches(entry.name)) continue;
    MergedTensor& tensor = plan.tensors.emplace_back();
    tensor.name = entry.name;
    tensor.tensor = compared_tensor(manifest, p);
  }
  if (only != nullptr && plan.tensors.empty()) refuse_unmatched_only();

  std::vector<Sight> sights(plan.tensors.size());
  const WorkPlan work = plan_work(manifest, run.comm.size());
  for (const std::int32_t rank : work.ranks(run.comm.process())) {
    std::shared_ptr<const RankFile> file;
    for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
      const ParameterEntry& entry = manifest.parameters[plan.tensors[i].tensor.parameter];
      if (!manifest.holds(entry, rank)) continue;
      if (!file) file = dump.rank_file(rank);
      const StoredShard& shard = file->locate(plan.tensors[i].tensor.parameter);
      const bool empty = (shard.none ? manifest.layout(entry, rank).elements() : shard.elements) == 0;
      if (empty && entry.elements != 0) continue;  // says nothing of the tensor
      if (shard.none) {
        plan.none.push_back({i, rank});
      } else {
        add(sights[i], {shard.scale_inv.value_or(1.0F), 1, 0});
      }
    }
  }
  sights = gathered(run.comm, sights);
  for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
    MergedTensor& tensor = plan.tensors[i];
    tensor.none = sights[i].values == 0;
    tensor.dtype = written_as(tensor, sights[i], format);
    if (is_float8(tensor.dtype) && sights[i].scale_inv != 1.0F) tensor.scale_inv = sights[i].scale_inv;
  }
  if (format == MergeFormat::safetensors) {
    name_for_safetensors(manifest, plan.tensors);
  } else {
    name_datasets(manifest, plan.tensors);
  }
  return plan;
}

}  // namespace gradclip
