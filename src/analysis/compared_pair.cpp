#include "gradclip/analysis/compared_pair.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using Kind = Placement::Kind;
using Entries = std::vector<std::size_t>;  // of one name, in manifest order

/// The shape that both have, or nothing.
std::optional<std::vector<std::int64_t>> common_shape(const ComparedTensor& a, const ComparedTensor& b) {
  if (a.shape == b.shape) return a.shape;
  for (const auto* pair : {&a, &b}) {
    const ComparedTensor& stacked = *pair;
    const ComparedTensor& other = pair == &a ? b : a;
    if (!stacked.distinct || other.distinct || stacked.shape.size() < 2) continue;
    std::vector<std::int64_t> joined(stacked.shape.begin() + 1, stacked.shape.end());
    joined[0] *= stacked.shape[0];
    if (joined == other.shape) return joined;
  }
  return std::nullopt;
}

std::unordered_map<std::string, Entries> entries_by_name(const Manifest& manifest) {
  std::unordered_map<std::string, Entries> entries;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) entries[manifest.parameters[p].name].push_back(p);
  return entries;
}

void refuse_merged_names(const Manifest& a, const NameMap& names) {
  std::unordered_map<std::string, std::string> origin;
  for (const ParameterEntry& entry : a.parameters) {
    const std::string mapped = names.mapped(entry.name);
    const auto [place, is_new] = origin.emplace(mapped, entry.name);
    if (is_new || place->second == entry.name) continue;
    throw Error(ExitCode::usage, {.where = "--map",
                                  .found = fmt::format("it makes {} of both {} and {}", quoted(mapped),
                                                       quoted(place->second), quoted(entry.name)),
                                  .expected = "a name of its own for each parameter",
                                  .advice = "make the expressions narrower: ^ and $ anchor them"});
  }
}

void settle(ComparedPair& pair) {
  if (const auto shape = common_shape(*pair.a, *pair.b)) {
    pair.shape = *shape;
  } else {
    pair.status = PairStatus::shapes_differ;
  }
}

}  // namespace

ComparedTensor compared_tensor(const Manifest& manifest, std::size_t parameter) {
  const ParameterEntry& entry = manifest.parameters[parameter];
  ComparedTensor tensor;
  tensor.parameter = parameter;
  tensor.shape = entry.shape;
  tensor.elements = entry.elements;
  tensor.dtype = entry.dtype;
  if (!entry.mesh) {
    tensor.distinct = entry.is_distinct(manifest.is_expert(entry, manifest.training.ep_axis_name.value_or(""))) &&
                      entry.ranks.size() > 1;
    if (tensor.distinct) {
      const auto ranks = static_cast<std::int64_t>(entry.ranks.size());
      tensor.shape.insert(tensor.shape.begin(), ranks);
      if (__builtin_mul_overflow(tensor.elements, entry.ranks.size(), &tensor.elements)) {
        throw Error(ExitCode::bad_input, {.where = "parameter " + quoted(entry.name),
                                          .found = fmt::format("{} ranks hold 2^64 elements or more", ranks),
                                          .expected = "fewer",
                                          .advice = {}});
      }
    } else {
      tensor.copies = static_cast<std::uint32_t>(entry.ranks.size());
    }
    return tensor;
  }
  const DeviceMesh& mesh = manifest.meshes[*entry.mesh];
  for (std::size_t d = 0; d < mesh.dimensions(); ++d) {
    const Kind kind = entry.layout()[d].kind;
    const auto extent = static_cast<std::uint32_t>(mesh.shape()[d]);
    if (kind == Kind::replicate) tensor.copies *= extent;
    if (kind == Kind::partial) tensor.addends *= extent;
  }
  tensor.steps = reduction_steps(mesh, entry.layout());
  return tensor;
}

ShardPart shard_part(const Manifest& manifest, const ComparedTensor& tensor, std::int32_t rank) {
  const ParameterEntry& entry = manifest.parameters[tensor.parameter];
  ShardPart part;
  if (!entry.mesh) {
    const auto place = static_cast<std::uint32_t>(std::lower_bound(entry.ranks.begin(), entry.ranks.end(), rank) -
                                                  entry.ranks.begin());
    if (tensor.distinct) {
      part.begin = place * entry.elements;
    } else {
      part.copy = place;
    }
    return part;
  }
  const DeviceMesh& mesh = manifest.meshes[*entry.mesh];
  const Coordinate at = mesh.coordinate(rank);
  for (std::size_t d = 0; d < at.size(); ++d) {
    const auto extent = static_cast<std::uint32_t>(mesh.shape()[d]);
    const auto index = static_cast<std::uint32_t>(at[d]);
    const Kind kind = entry.layout()[d].kind;
    if (kind == Kind::replicate) part.copy = part.copy * extent + index;
    if (kind == Kind::partial) part.addend = part.addend * extent + index;
  }
  return part;
}

std::vector<ComparedPair> compared_pairs(const Manifest& a, const Manifest& b, const NameMap& names,
                                         const NamePattern* only) {
  refuse_merged_names(a, names);
  const std::unordered_map<std::string, Entries> in_b = entries_by_name(b);
  const auto asked_for = [&](const std::string& name, const std::string& other) {
    return only == nullptr || only->matches(name) || only->matches(other);
  };
  std::vector<ComparedPair> pairs;
  std::unordered_map<std::string, std::pair<std::size_t, std::size_t>> seen;  // by B's name: how many, the first of A
  for (std::size_t p = 0; p < a.parameters.size(); ++p) {
    const std::string& name = a.parameters[p].name;
    const std::string mapped = names.mapped(name);
    if (!asked_for(name, mapped)) continue;
    ComparedPair& pair = pairs.emplace_back();
    pair.name = name;
    if (mapped != name) pair.mapped_name = mapped;
    pair.a = compared_tensor(a, p);
    const auto found = in_b.find(mapped);
    if (found == in_b.end()) {
      pair.status = PairStatus::missing;
      continue;
    }
    const auto [place, is_first] = seen.emplace(mapped, std::pair(0, p));
    const std::size_t occurrence = place->second.first++;
    pair.b = compared_tensor(b, found->second[occurrence < found->second.size() ? occurrence : 0]);
    settle(pair);
  }
  std::unordered_map<std::string, std::size_t> passed;
  for (std::size_t p = 0; p < b.parameters.size(); ++p) {
    const std::string& name = b.parameters[p].name;
    const std::size_t occurrence = passed[name]++;
    const auto counterpart = seen.find(name);
    if (counterpart != seen.end() && occurrence < counterpart->second.first) continue;
    if (counterpart == seen.end() && !asked_for(name, name)) continue;
    ComparedPair& pair = pairs.emplace_back();
    pair.name = name;
    pair.b = compared_tensor(b, p);
    if (counterpart == seen.end()) {
      pair.status = PairStatus::extra;
      continue;
    }
    pair.name = a.parameters[counterpart->second.second].name;
    if (pair.name != name) pair.mapped_name = name;
    pair.a = compared_tensor(a, counterpart->second.second);
    settle(pair);
  }
  return pairs;
}

std::int32_t likely_holder(const Manifest& manifest, const ComparedTensor& tensor, std::uint64_t element) {
  const ParameterEntry& entry = manifest.parameters[tensor.parameter];
  if (!entry.mesh) {
    if (!tensor.distinct || entry.elements == 0) return entry.ranks.empty() ? 0 : entry.ranks.front();
    return entry
        .ranks[static_cast<std::size_t>(std::min<std::uint64_t>(element / entry.elements, entry.ranks.size() - 1))];
  }
  // The mesh dimensions that cut, the one whose pieces are largest first: strided shards are cut after the others.
  const DeviceMesh& mesh = manifest.meshes[*entry.mesh];
  std::vector<std::size_t> cuts;
  for (const bool late : {false, true}) {
    for (std::size_t d = 0; d < mesh.dimensions(); ++d) {
      const Kind kind = entry.layout()[d].kind;
      const bool cuts_late = kind == Kind::strided_shard || kind == Kind::flat;
      if (cuts_late == late && (kind == Kind::shard || cuts_late)) cuts.push_back(d);
    }
  }
  Coordinate at(mesh.dimensions(), 0);
  double place = tensor.elements == 0 ? 0.0 : static_cast<double>(element) / static_cast<double>(tensor.elements);
  for (const std::size_t d : cuts) {
    const auto extent = static_cast<double>(mesh.shape()[d]);
    const double index = std::min(std::floor(place * extent), extent - 1.0);
    at[d] = static_cast<std::int64_t>(index);
    place = place * extent - index;
  }
  return mesh.rank_at(at);
}

}  // namespace gradclip
