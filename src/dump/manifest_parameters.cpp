#include "gradclip/dump/manifest_parameters.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>

namespace gradclip {
namespace {

constexpr std::int64_t kMaxElements = std::int64_t{1} << 62;
constexpr std::int64_t kAnyInteger = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kMaxTensorDimensions = 32;  // HDF5's own limit
constexpr std::size_t kNoMesh = static_cast<std::size_t>(-1);

void parse_dataset(const JsonField& field, ParameterEntry& entry) {
  const auto dataset = field.find("dataset");
  if (!dataset) {
    entry.dataset = link_name(entry.name);
    return;
  }
  entry.own_dataset = true;
  entry.dataset = dataset->name();
  if (entry.dataset.find('/') != std::string::npos || entry.dataset[0] == '.') {
    dataset->fail("a link name: no '/', and no '.' at its beginning");
  }
}

void parse_shape(const JsonField& field, ParameterEntry& entry) {
  const std::size_t dimensions = field.array().size();
  if (dimensions > kMaxTensorDimensions) {
    field.fail(fmt::format("has {} dimensions", dimensions), fmt::format("at most {}", kMaxTensorDimensions));
  }
  std::int64_t product = 1;  // of the extents that are not 0, so that parts of it cannot overflow either
  bool empty = false;
  entry.shape.reserve(dimensions);
  for (std::size_t d = 0; d < dimensions; ++d) {
    const std::int64_t extent = field.element(d).integer(0, kAnyInteger);
    empty = empty || extent == 0;
    if (extent != 0 && (__builtin_mul_overflow(product, extent, &product) || product >= kMaxElements)) {
      field.fail("has too many elements: " + field.value().dump(), "fewer than 2^62");
    }
    entry.shape.push_back(extent);
  }
  entry.elements = empty ? 0 : static_cast<std::uint64_t>(product);
}

void parse_type(const JsonField& field, ParameterEntry& entry) {
  const auto dtype = parse_dtype(field.string());
  if (!dtype) field.fail(std::string("one of ") + std::string(dtype_names()));
  entry.dtype = *dtype;
}

void parse_ranks(const JsonField& field, ParameterEntry& entry) {
  entry.ranks.reserve(field.array().size());
  for (std::size_t i = 0; i < field.value().size(); ++i) {
    entry.ranks.push_back(static_cast<std::int32_t>(field.element(i).integer(0, kMaxWorldSize - 1)));
  }
  std::sort(entry.ranks.begin(), entry.ranks.end());
  const auto twin = std::adjacent_find(entry.ranks.begin(), entry.ranks.end());
  if (twin != entry.ranks.end()) field.fail(fmt::format("has rank {} twice", *twin), "each rank once");
}

Copies parse_copies(const JsonField& field) {
  if (field.string() == "replicated") return Copies::replicated;
  if (field.string() == "distinct") return Copies::distinct;
  field.fail("\"replicated\" or \"distinct\"");
}

void parse_flat_ranges(const JsonField& field, ParameterEntry& entry) {
  for (const auto& [key, value] : field.object().items()) {
    const JsonField range = field.member(key, value);
    const bool digits = !key.empty() && key.size() <= 8 && key.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || std::to_string(std::stol(key)) != key) {
      field.fail("has the key " + quoted(key.substr(0, 100)), "ranks as keys");
    }
    if (range.array().size() != 2) range.fail("[begin, end]");
    const auto end = range.element(1).integer(0, static_cast<std::int64_t>(entry.elements));
    const auto begin = range.element(0).integer(0, end);
    entry.flat_ranges.emplace(static_cast<std::int32_t>(std::stol(key)), IndexRange{begin, end});
  }
}

}  // namespace

std::optional<DType> parse_sum_type(const JsonField& object, const char* key) {
  const auto field = object.find(key);
  if (!field) return std::nullopt;
  const auto dtype = parse_dtype(field->string());
  if (!dtype || size_of(*dtype) == 1) field->fail("float64, float32, float16 or bfloat16");
  return dtype;
}

std::size_t mesh_index(const Manifest& manifest, const MeshIndices& indices, const std::string& key,
                       const JsonField& field) {
  const auto found = indices.find(key);
  if (found == indices.end()) {
    std::string known;
    for (std::size_t i = 0; i < std::min<std::size_t>(manifest.meshes.size(), 10); ++i) {
      known += (i == 0 ? "" : ", ") + quoted(manifest.meshes[i].name());
    }
    field.fail("names the mesh " + quoted(key.substr(0, kMaxNameBytes)) + ", which is not in \"meshes\"",
               manifest.meshes.empty() ? "null, as there are no meshes" : "one of " + known);
  }
  return found->second;
}

namespace {

/// A number in the document is not how a person knows a parameter.
Error with_parameter_name(const Error& error, const nlohmann::json& parameter) {
  ErrorText text = error.text();
  const auto name = parameter.is_object() ? parameter.find("name") : parameter.end();
  if (!parameter.is_object() || name == parameter.end() || !name->is_string()) return error;
  const std::string known = quoted(name->get_ref<const std::string&>().substr(0, 200));
  text.advice += (text.advice.empty() ? "" : "; ") + ("the parameter is " + known);
  return {error.code(), std::move(text), error.location()};
}

/// Name and dataset of an entry that is wrong elsewhere; empty where they are.
ParameterEntry known_of(const JsonField& field) {
  ParameterEntry known;
  try {
    known.name = field.at("name").name();
    parse_dataset(field, known);
    return known;
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

void ParameterParser::take(std::size_t index, const nlohmann::json& value) {
  if (first_error_) return;
  try {
    take_checked(index, value);
  } catch (const Error& error) {
    if (problems_ == nullptr) {
      first_error_ = std::make_exception_ptr(with_parameter_name(error, value));
      return;
    }
    problems_->push_back(with_parameter_name(error, value).text());
    manifest_.parameters.push_back(known_of({value, where_, {}}));
    pending_.push_back({kNoMesh, false, true});
  }
}

template <class Function>
bool ParameterParser::attempt(std::size_t index, const Function& function) {
  try {
    function();
    return true;
  } catch (const Error& error) {
    if (problems_ == nullptr) throw;
    problems_->push_back(error.text());
    pending_[index].refused = true;
    return false;
  }
}

void ParameterParser::finish(const MeshIndices& mesh_indices, const std::set<std::string>& refused_meshes) {
  rethrow();
  for (std::size_t i = 0; i < manifest_.parameters.size(); ++i) {
    Pending& pending = pending_[i];
    if (pending.mesh != kNoMesh && refused_meshes.count(mesh_names_[pending.mesh]) != 0) pending.refused = true;
    if (!pending.refused) attempt(i, [&] { finish_parameter(i, mesh_indices); });
  }
  refuse_shared_datasets();
  leave_out_refused();
}

void ParameterParser::leave_out_refused() {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < manifest_.parameters.size(); ++i) {
    ParameterEntry& entry = manifest_.parameters[i];
    if (pending_[i].refused) {
      manifest_.refused.push_back(std::move(entry));
    } else if (kept++ != i) {
      manifest_.parameters[kept - 1] = std::move(entry);
    }
  }
  manifest_.parameters.resize(kept);
}

void ParameterParser::take_checked(std::size_t index, const nlohmann::json& value) {
  const JsonField field(value, where_, fmt::format("parameters[{}]", index));
  ParameterEntry entry;
  Pending pending{kNoMesh, false};
  entry.name = field.at("name").name();
  parse_dataset(field, entry);
  if (const auto part = field.find("model_part")) {
    entry.model_part = part->integer(0, std::numeric_limits<std::int32_t>::max());
  }
  parse_shape(field.at("shape"), entry);
  parse_type(field.at("dtype"), entry);
  if (const auto mesh = field.find("mesh")) pending.mesh = intern(mesh->name());
  if (const auto object = field.find("mesh_object")) {
    entry.mesh_object = object->integer(0, std::numeric_limits<std::int32_t>::max());
  }
  if (const auto placements = field.find("placements")) entry.placements = parse_placements(*placements, entry);
  if (const auto placements = field.find("gradient_placements")) {
    entry.gradient_placements = parse_placements(*placements, entry);
  }
  if (const auto ranks = field.find("ranks")) {
    pending.has_ranks = true;
    parse_ranks(*ranks, entry);
  }
  if (const auto copies = field.find("copies")) entry.copies = parse_copies(*copies);
  if (const auto expert = field.find("expert")) entry.expert = expert->boolean();
  if (const auto tied = field.find("tied")) entry.tied = tied->name();
  if (const auto ranges = field.find("flat_ranges")) parse_flat_ranges(*ranges, entry);
  entry.reduce_dtype = parse_sum_type(field, "reduce_dtype");
  entry.storage_dtype = parse_sum_type(field, "storage_dtype");
  manifest_.parameters.push_back(std::move(entry));
  pending_.push_back(pending);
}

std::vector<Placement> ParameterParser::parse_placements(const JsonField& field, const ParameterEntry& entry) {
  std::vector<Placement> placements;
  placements.reserve(field.array().size());
  for (std::size_t i = 0; i < field.value().size(); ++i) {
    placements.push_back(parse_one(field.element(i), entry.shape.size()));
    if (i > 0 && placements[i - 1].kind == Placement::Kind::flat) {
      field.fail("has Flat() before another placement", "Flat() as the last one");
    }
  }
  return placements;
}

const Placement& ParameterParser::parse_one(const JsonField& field, std::size_t dimensions) {
  auto& known = placements_[dimensions];
  const std::string& text = field.string();
  if (const auto found = known.find(text); found != known.end()) return found->second;
  const Placement placement = located(field, [&] { return parse_placement(text, dimensions); });
  const bool sharded = placement.kind == Placement::Kind::shard || placement.kind == Placement::Kind::strided_shard;
  if (sharded && (placement.dim < 0 || placement.dim >= static_cast<std::int64_t>(dimensions))) {
    field.fail(fmt::format("a dimension of a tensor that has {}", dimensions));
  }
  if (placement.kind == Placement::Kind::strided_shard && placement.split_factor < 1) {
    field.fail("a split factor of at least 1");
  }
  return known.emplace(text, placement).first->second;
}

std::size_t ParameterParser::intern(const std::string& mesh) {
  const auto [position, inserted] = mesh_name_indices_.emplace(mesh, mesh_names_.size());
  if (inserted) mesh_names_.push_back(mesh);
  return position->second;
}

void ParameterParser::finish_parameter(std::size_t index, const MeshIndices& mesh_indices) {
  static const nlohmann::json kUnused;
  ParameterEntry& entry = manifest_.parameters[index];
  const JsonField field(kUnused, where_, fmt::format("parameters[{}] ({})", index, gradclip::quoted(entry.name)));
  const Pending& pending = pending_[index];
  if (pending.mesh == kNoMesh) {
    finish_plain(field, entry);
  } else {
    entry.mesh = mesh_index(manifest_, mesh_indices, mesh_names_[pending.mesh], field);
    finish_on_mesh(field, entry, pending);
  }
}

void ParameterParser::finish_plain(const JsonField& field, const ParameterEntry& entry) const {
  if (!entry.placements.empty() || entry.gradient_placements) {
    field.fail("has placements but no mesh", "a mesh, or none of both");
  }
  if (!entry.flat_ranges.empty()) field.fail("has flat_ranges but no mesh", "a mesh with a Flat() placement");
  if (entry.ranks.empty()) field.fail("has no mesh and no ranks", "\"ranks\", a list of those that hold the tensor");
  check_rank(field, entry.ranks.back());
}

void ParameterParser::finish_on_mesh(const JsonField& field, ParameterEntry& entry, const Pending& pending) const {
  const DeviceMesh& mesh = manifest_.meshes[*entry.mesh];
  const auto check_count = [&](const std::vector<Placement>& placements, const char* key) {
    if (placements.size() != mesh.dimensions()) {
      field.fail(fmt::format("has {} {}", placements.size(), key),
                 fmt::format("{}, one for each dimension of the mesh {}", mesh.dimensions(), quoted(mesh.name())));
    }
  };
  check_count(entry.placements, "placements");
  if (entry.gradient_placements) check_count(*entry.gradient_placements, "gradient_placements");
  if (pending.has_ranks) {
    std::vector<std::int32_t> of_mesh = mesh.ranks();
    std::sort(of_mesh.begin(), of_mesh.end());
    if (entry.ranks != of_mesh) {
      field.fail("has ranks that are not those of its mesh " + quoted(mesh.name()), "the same, or no \"ranks\"");
    }
    entry.ranks = {};
  }
  check_flat(field, entry, mesh);
}

void ParameterParser::check_flat(const JsonField& field, const ParameterEntry& entry, const DeviceMesh& mesh) const {
  const auto& layout = entry.layout();
  const bool flat = !layout.empty() && layout.back().kind == Placement::Kind::flat;
  if (!flat && !entry.flat_ranges.empty()) {
    field.fail("has flat_ranges but no Flat() placement", "Flat() as the last placement");
  }
  for (const auto& [rank, range] : entry.flat_ranges) {
    check_rank(field, rank);
    if (!mesh.contains(rank)) {
      field.fail(fmt::format("has a flat range for rank {}", rank), "ranks of its mesh " + quoted(mesh.name()));
    }
  }
  if (flat && entry.flat_ranges.size() != mesh.ranks().size()) {
    field.fail(fmt::format("has {} flat_ranges", entry.flat_ranges.size()),
               fmt::format("{}, one for each rank of the mesh {}", mesh.ranks().size(), quoted(mesh.name())));
  }
}

void ParameterParser::check_rank(const JsonField& field, std::int32_t rank) const {
  if (rank >= manifest_.world_size) {
    field.fail(fmt::format("names rank {}", rank),
               fmt::format("ranks below the world size of {}", manifest_.world_size));
  }
}

void ParameterParser::refuse_shared_datasets() {
  refuse_shared([](const ParameterEntry& entry) -> const std::string& { return entry.dataset; });
  const auto& entries = manifest_.parameters;
  const bool names_may_meet =
      std::any_of(entries.begin(), entries.end(), [](const ParameterEntry& entry) { return entry.own_dataset; });
  if (names_may_meet) refuse_shared(&ParameterEntry::recorded_name);
}

template <class Key>
void ParameterParser::refuse_shared(const Key& key) {
  std::unordered_map<std::string_view, std::vector<std::size_t>> repeated;
  std::unordered_map<std::string_view, std::size_t> first;
  first.reserve(manifest_.parameters.size());
  for (std::size_t i = 0; i < manifest_.parameters.size(); ++i) {
    if (pending_[i].refused) continue;
    const auto [known, is_new] = first.emplace(std::invoke(key, manifest_.parameters[i]), i);
    if (is_new) continue;
    auto& entries = repeated[known->first];
    if (entries.empty()) entries.push_back(known->second);
    entries.push_back(i);
  }
  std::set<std::vector<std::size_t>> disjoint;  // combinations of meshes that were found to share no rank
  for (const auto& [name, entries] : repeated) refuse_shared_ranks(entries, disjoint);
}

void ParameterParser::refuse_shared_ranks(const std::vector<std::size_t>& entries,
                                          std::set<std::vector<std::size_t>>& disjoint) {
  std::vector<std::size_t> meshes;
  for (const std::size_t i : entries) meshes.push_back(manifest_.parameters[i].mesh.value_or(kNoMesh));
  std::sort(meshes.begin(), meshes.end());
  const bool all_on_meshes = meshes.back() != kNoMesh;
  if (all_on_meshes && disjoint.count(meshes) != 0) return;
  std::unordered_map<std::int32_t, std::size_t> holder;
  bool shares = false;
  for (const std::size_t i : entries) shares = !attempt(i, [&] { take_ranks(i, holder); }) || shares;
  if (all_on_meshes && !shares) disjoint.insert(std::move(meshes));
}

/// Makes an entry the holder of its ranks' datasets. Errors: another one is already.
void ParameterParser::take_ranks(std::size_t index, std::unordered_map<std::int32_t, std::size_t>& holder) const {
  const ParameterEntry& entry = manifest_.parameters[index];
  for (const std::int32_t rank : entry.mesh ? manifest_.meshes[*entry.mesh].ranks() : entry.ranks) {
    const auto [other, is_new] = holder.emplace(rank, index);
    if (is_new) continue;
    const bool one_dataset = entry.dataset == manifest_.parameters[other->second].dataset;
    throw Error(
        ExitCode::bad_input,
        {.where = fmt::format("{}, parameters[{}] ({})", where_, index, quoted(entry.name)),
         .found = one_dataset
                      ? fmt::format("stands on rank {} a second time, after parameters[{}]", rank, other->second)
                      : fmt::format("is called {} in /none and /packed/index of rank {}, as is "
                                    "parameters[{}]",
                                    quoted(entry.recorded_name()), rank, other->second),
         .expected = one_dataset ? "entries of one name to be on different ranks, or to have a \"dataset\" of their own"
                                 : "a \"dataset\" that is not the name of another entry",
         .advice = {}});
  }
}

}  // namespace gradclip
