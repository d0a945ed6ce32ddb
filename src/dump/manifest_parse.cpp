#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/manifest.hpp"

namespace gradclip {
namespace {

constexpr std::int64_t kMaxWorldSize = std::int64_t{1} << 24;
constexpr std::int64_t kMaxElements = std::int64_t{1} << 62;
constexpr std::int64_t kAnyInteger = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kMaxTensorDimensions = 32;  // HDF5's own limit
constexpr std::size_t kNoMesh = static_cast<std::size_t>(-1);

/// What another room refuses, with the place in the document before it.
template <class Function>
auto located(const JsonField& field, Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const Error& error) {
    ErrorText text = error.text();
    text.where = text.where.empty() ? field.where() : field.where() + ": " + text.where;
    throw Error(error.code(), std::move(text), error.location());
  }
}

class ManifestParser {
 public:
  explicit ManifestParser(const std::string& where) : where_(where) {}

  Manifest parse(const std::string& text) {
    const JsonStream stream{"parameters", [this](const std::string&, std::size_t index, nlohmann::json&& value) {
                              take_or_remember(index, value);
                            }};
    const JsonDocument document = parse_json(text, where_, &stream);
    const JsonField root(document.root, where_, "");
    check_format(root);
    if (first_error_) std::rethrow_exception(first_error_);
    check_checksum(root, document.checksum);
    parse_head(root);
    parse_meshes(root);
    if (!root.at("parameters").value().is_array()) root.at("parameters").fail("a list");
    for (std::size_t i = 0; i < manifest_.parameters.size(); ++i) finish_parameter(i);
    refuse_shared_datasets();
    if (const auto training = root.find("training")) parse_training(*training);
    if (const auto files = root.find("files")) parse_files(*files);
    return std::move(manifest_);
  }

 private:
  // ---- the head of the document ------------------------------------------------------------------------------------

  static void check_format(const JsonField& root) {
    const JsonField format = root.at("format");
    if (format.string() != "gradclip.dump") format.fail("\"gradclip.dump\"");
    const JsonField version = root.at("version");
    if (version.integer(1, kAnyInteger) != 1) {
      version.fail(fmt::format("is version {}", version.value().dump()), "version 1", "use a newer gradclip");
    }
  }

  void check_checksum(const JsonField& root, std::uint64_t actual) {
    const auto recorded = root.find("checksum");
    if (!recorded) return;
    const auto value = parse_checksum(recorded->string());
    if (!value) recorded->fail("16 hexadecimal digits");
    if (*value != actual) {
      recorded->fail(
          "the content of the manifest has the checksum " + checksum_text(actual),
          checksum_text(*value) + " (what the manifest says of itself)",
          "the manifest was changed or damaged after it was written; if you changed it on purpose, remove its "
          "key \"checksum\"");
    }
    manifest_.has_checksum = true;
  }

  void parse_head(const JsonField& root) {
    manifest_.world_size = static_cast<std::int32_t>(root.at("world_size").integer(1, kMaxWorldSize));
    manifest_.rank_file_pattern = checked_pattern(root.at("rank_file"));
    if (const auto step = root.find("step")) manifest_.step = step->integer(-kAnyInteger, kAnyInteger);
    if (const auto microbatch = root.find("microbatch")) {
      const std::int64_t count = microbatch->at("count").integer(1, kAnyInteger);
      manifest_.microbatch = {microbatch->at("index").integer(0, count - 1), count};
    }
    if (const auto state = root.find("state")) manifest_.state = parse_state(*state);
    if (const auto producer = root.find("producer")) manifest_.producer = describe_producer(*producer);
  }

  static std::string checked_pattern(const JsonField& field) {
    const std::string& pattern = field.name();
    const auto refuse = [&] {
      field.fail("a file name with exactly one {rank} or {rank:0Nd} and no directory separator");
    };
    const std::size_t open = pattern.find('{');
    const std::size_t close = pattern.find('}');
    if (open == std::string::npos || close == std::string::npos || close < open) refuse();
    if (pattern.find('{', open + 1) != std::string::npos || pattern.find('}', close + 1) != std::string::npos) refuse();
    if (pattern.find('/') != std::string::npos || pattern.size() > 200) refuse();
    const std::string inside = pattern.substr(open + 1, close - open - 1);
    if (inside == "rank") return pattern;
    const bool padded = inside.starts_with("rank:0") && inside.ends_with("d") && inside.size() >= 8 &&
                        inside.size() <= 9 && inside.find_first_not_of("0123456789", 6) == inside.size() - 1;
    const int width = padded ? std::stoi(inside.substr(6)) : 0;
    if (!padded || width < 1 || width > 20) refuse();
    return pattern;
  }

  static GradientState parse_state(const JsonField& field) {
    for (const auto state : {GradientState::before_scale, GradientState::before_clip, GradientState::after_clip}) {
      if (field.string() == name(state)) return state;
    }
    field.fail("\"before_scale\", \"before_clip\" or \"after_clip\"");
  }

  static std::string describe_producer(const JsonField& field) {
    if (field.value().is_string()) return printable(field.string());
    const auto part = [&](const char* key) {
      const auto found = field.find(key);
      return found ? printable(found->string()) : std::string();
    };
    std::string text = part("name");
    if (const std::string version = part("version"); !version.empty()) text += (text.empty() ? "" : " ") + version;
    if (const std::string framework = part("framework"); !framework.empty()) text += " (" + framework + ")";
    return text;
  }

  // ---- meshes ------------------------------------------------------------------------------------------------------

  void parse_meshes(const JsonField& root) {
    if (const auto meshes = root.find("meshes")) {
      for (const auto& [key, value] : meshes->object().items()) parse_mesh(key, meshes->member(key, value));
    }
    if (const auto device_mesh = root.find("device_mesh")) manifest_.device_mesh = mesh_index(*device_mesh);
    if (const auto moe = root.find("moe_mesh")) {
      if (moe->value().is_string()) {
        manifest_.moe_meshes.push_back(mesh_index(*moe));
      } else {
        if (!moe->value().is_array()) moe->fail("null, the name of a mesh or a list of names");
        for (std::size_t i = 0; i < moe->value().size(); ++i) {
          manifest_.moe_meshes.push_back(mesh_index(moe->element(i)));
        }
      }
    }
  }

  void parse_mesh(const std::string& key, const JsonField& field) {
    if (key.empty() || key.size() > kMaxNameBytes) field.fail("a mesh with a name of 1 to 4096 bytes");
    const JsonField dim_names = field.at("dim_names");
    std::vector<std::string> names;
    for (std::size_t i = 0; i < dim_names.array().size(); ++i) names.push_back(dim_names.element(i).name());
    std::vector<std::int64_t> shape;
    std::vector<std::int32_t> ranks;
    const JsonField array = field.at("ranks");
    static_cast<void>(array.array());
    measure(array, shape);
    flatten(array, shape, 0, ranks);
    mesh_indices_.emplace(key, manifest_.meshes.size());
    located(field, [&] { manifest_.meshes.emplace_back(key, std::move(names), std::move(shape), std::move(ranks)); });
  }

  static void measure(const JsonField& field, std::vector<std::int64_t>& shape) {
    for (const nlohmann::json* level = &field.value(); level->is_array(); level = &level->front()) {
      if (level->empty()) field.fail("has an empty dimension", "at least one rank in each dimension");
      shape.push_back(static_cast<std::int64_t>(level->size()));
    }
  }

  void flatten(const JsonField& field, const std::vector<std::int64_t>& shape, std::size_t depth,
               std::vector<std::int32_t>& ranks) const {
    if (depth == shape.size()) {
      ranks.push_back(rank(field));
      return;
    }
    if (!field.value().is_array() || static_cast<std::int64_t>(field.value().size()) != shape[depth]) {
      field.fail(fmt::format("a list of {} elements, as its neighbours", shape[depth]));
    }
    for (std::size_t i = 0; i < field.value().size(); ++i) flatten(field.element(i), shape, depth + 1, ranks);
  }

  std::int32_t rank(const JsonField& field) const {
    const std::int64_t value = field.integer(0, kAnyInteger);
    if (value >= manifest_.world_size) {
      field.fail(fmt::format("is rank {}", value),
                 fmt::format("a rank below the world size of {}", manifest_.world_size));
    }
    return static_cast<std::int32_t>(value);
  }

  std::size_t mesh_index(const JsonField& field) const { return mesh_index(field.string(), field); }

  std::size_t mesh_index(const std::string& key, const JsonField& field) const {
    const auto found = mesh_indices_.find(key);
    if (found == mesh_indices_.end()) {
      std::string known;
      for (std::size_t i = 0; i < std::min<std::size_t>(manifest_.meshes.size(), 10); ++i) {
        known += (i == 0 ? "" : ", ") + quoted(manifest_.meshes[i].name());
      }
      field.fail("names the mesh " + quoted(key.substr(0, kMaxNameBytes)) + ", which is not in \"meshes\"",
                 manifest_.meshes.empty() ? "null, as there are no meshes" : "one of " + known);
    }
    return found->second;
  }

  // ---- parameters: first as they come, then, once meshes and world size are known, completely
  // ------------------------

  /// What an entry's check still needs when the rest of the document is known.
  struct Pending {
    std::size_t mesh = kNoMesh;  // index into mesh_names_
    bool has_ranks = false;
  };

  /// Another format's or version's parameters may look different, so what is wrong with one is said after
  /// check_format().
  void take_or_remember(std::size_t index, const nlohmann::json& value) {
    if (first_error_) return;
    try {
      take_parameter(index, value);
    } catch (const Error&) {
      first_error_ = std::current_exception();
    }
  }

  void take_parameter(std::size_t index, const nlohmann::json& value) {
    const JsonField field(value, where_, fmt::format("parameters[{}]", index));
    ParameterEntry entry;
    Pending pending;
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
    manifest_.parameters.push_back(std::move(entry));
    pending_.push_back(pending);
  }

  static void parse_dataset(const JsonField& field, ParameterEntry& entry) {
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

  static void parse_shape(const JsonField& field, ParameterEntry& entry) {
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

  static void parse_type(const JsonField& field, ParameterEntry& entry) {
    const auto dtype = parse_dtype(field.string());
    if (!dtype) field.fail(std::string("one of ") + std::string(dtype_names()));
    entry.dtype = *dtype;
  }

  std::vector<Placement> parse_placements(const JsonField& field, const ParameterEntry& entry) {
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

  const Placement& parse_one(const JsonField& field, std::size_t dimensions) {
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

  static void parse_ranks(const JsonField& field, ParameterEntry& entry) {
    entry.ranks.reserve(field.array().size());
    for (std::size_t i = 0; i < field.value().size(); ++i) {
      entry.ranks.push_back(static_cast<std::int32_t>(field.element(i).integer(0, kMaxWorldSize - 1)));
    }
    std::sort(entry.ranks.begin(), entry.ranks.end());
    const auto twin = std::adjacent_find(entry.ranks.begin(), entry.ranks.end());
    if (twin != entry.ranks.end()) field.fail(fmt::format("has rank {} twice", *twin), "each rank once");
  }

  static Copies parse_copies(const JsonField& field) {
    if (field.string() == "replicated") return Copies::replicated;
    if (field.string() == "distinct") return Copies::distinct;
    field.fail("\"replicated\" or \"distinct\"");
  }

  static void parse_flat_ranges(const JsonField& field, ParameterEntry& entry) {
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

  std::size_t intern(const std::string& mesh) {
    const auto [position, inserted] = mesh_name_indices_.emplace(mesh, mesh_names_.size());
    if (inserted) mesh_names_.push_back(mesh);
    return position->second;
  }

  void finish_parameter(std::size_t index) {
    static const nlohmann::json kUnused;
    ParameterEntry& entry = manifest_.parameters[index];
    const JsonField field(kUnused, where_, fmt::format("parameters[{}] ({})", index, gradclip::quoted(entry.name)));
    const Pending& pending = pending_[index];
    if (pending.mesh == kNoMesh) {
      finish_plain(field, entry);
    } else {
      entry.mesh = mesh_index(mesh_names_[pending.mesh], field);
      finish_on_mesh(field, entry, pending);
    }
  }

  void finish_plain(const JsonField& field, const ParameterEntry& entry) const {
    if (!entry.placements.empty() || entry.gradient_placements) {
      field.fail("has placements but no mesh", "a mesh, or none of both");
    }
    if (!entry.flat_ranges.empty()) field.fail("has flat_ranges but no mesh", "a mesh with a Flat() placement");
    if (entry.ranks.empty()) field.fail("has no mesh and no ranks", "\"ranks\", a list of those that hold the tensor");
    check_rank(field, entry.ranks.back());
  }

  void finish_on_mesh(const JsonField& field, ParameterEntry& entry, const Pending& pending) const {
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

  void check_flat(const JsonField& field, const ParameterEntry& entry, const DeviceMesh& mesh) const {
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

  void check_rank(const JsonField& field, std::int32_t rank) const {
    if (rank >= manifest_.world_size) {
      field.fail(fmt::format("names rank {}", rank),
                 fmt::format("ranks below the world size of {}", manifest_.world_size));
    }
  }

  // ---- no two entries may mean the same dataset of the same rank
  // -----------------------------------------------------

  void refuse_shared_datasets() {
    std::unordered_map<std::string_view, std::vector<std::size_t>> repeated;
    std::unordered_map<std::string_view, std::size_t> first;
    first.reserve(manifest_.parameters.size());
    for (std::size_t i = 0; i < manifest_.parameters.size(); ++i) {
      const auto [known, is_new] = first.emplace(manifest_.parameters[i].dataset, i);
      if (is_new) continue;
      auto& entries = repeated[known->first];
      if (entries.empty()) entries.push_back(known->second);
      entries.push_back(i);
    }
    std::set<std::vector<std::size_t>> disjoint;  // combinations of meshes that were found to share no rank
    for (const auto& [dataset, entries] : repeated) refuse_shared_ranks(entries, disjoint);
  }

  void refuse_shared_ranks(const std::vector<std::size_t>& entries, std::set<std::vector<std::size_t>>& disjoint) {
    std::vector<std::size_t> meshes;
    for (const std::size_t i : entries) meshes.push_back(manifest_.parameters[i].mesh.value_or(kNoMesh));
    std::sort(meshes.begin(), meshes.end());
    const bool all_on_meshes = meshes.back() != kNoMesh;
    if (all_on_meshes && disjoint.count(meshes) != 0) return;
    std::unordered_map<std::int32_t, std::size_t> holder;
    for (const std::size_t i : entries) {
      const ParameterEntry& entry = manifest_.parameters[i];
      for (const std::int32_t rank : entry.mesh ? manifest_.meshes[*entry.mesh].ranks() : entry.ranks) {
        const auto [other, is_new] = holder.emplace(rank, i);
        if (!is_new) refuse_shared_rank(entry, i, other->second, rank);
      }
    }
    if (all_on_meshes) disjoint.insert(std::move(meshes));
  }

  [[noreturn]] void refuse_shared_rank(const ParameterEntry& entry, std::size_t index, std::size_t other,
                                       std::int32_t rank) const {
    throw Error(ExitCode::bad_input,
                {.where = fmt::format("{}, parameters[{}] ({})", where_, index, quoted(entry.name)),
                 .found = fmt::format("stands on rank {} a second time, after parameters[{}]", rank, other),
                 .expected = "entries of one name to be on different ranks, or to have a \"dataset\" of their own",
                 .advice = {}});
  }

  // ---- training and files
  // --------------------------------------------------------------------------------------------

  void parse_training(const JsonField& field) {
    TrainingRecord& training = manifest_.training;
    const auto number = [&](const char* key, std::optional<double>& to) {
      if (const auto found = field.find(key)) to = found->number();
    };
    const auto integer = [&](const char* key, std::optional<std::int64_t>& to) {
      if (const auto found = field.find(key)) to = found->integer(-kAnyInteger, kAnyInteger);
    };
    const auto boolean = [&](const char* key, std::optional<bool>& to) {
      if (const auto found = field.find(key)) to = found->boolean();
    };
    const auto text = [&](const char* key, std::optional<std::string>& to) {
      if (const auto found = field.find(key)) to = found->name();
    };
    static_cast<void>(field.object());
    number("max_grad_norm", training.max_grad_norm);
    number("norm_type", training.norm_type);
    boolean("pp_enabled", training.pp_enabled);
    text("pp_axis_name", training.pp_axis_name);
    text("ep_axis_name", training.ep_axis_name);
    integer("num_label_tokens", training.num_label_tokens);
    integer("dp_group_size", training.dp_group_size);
    integer("expert_tp_replication_factor", training.expert_tp_replication_factor);
    boolean("foreach", training.foreach);
    boolean("use_torch_clip_grad_norm", training.use_torch_clip_grad_norm);
    integer("ignore_index", training.ignore_index);
    number("grad_norm", training.grad_norm);
  }

  void parse_files(const JsonField& field) {
    for (const auto& [key, value] : field.object().items()) {
      const JsonField file = field.member(key, value);
      FileRecord record;
      record.bytes = static_cast<std::uint64_t>(file.at("bytes").integer(0, kAnyInteger));
      if (const auto checksum = file.find("xxh3_64")) {
        record.xxh3_64 = parse_checksum(checksum->string());
        if (!record.xxh3_64) checksum->fail("16 hexadecimal digits");
      }
      manifest_.files.emplace(key, record);
    }
  }

  const std::string& where_;
  Manifest manifest_;
  std::exception_ptr first_error_;
  std::vector<Pending> pending_;
  std::vector<std::string> mesh_names_;  // as parameters name them
  std::unordered_map<std::string, std::size_t> mesh_name_indices_;
  std::unordered_map<std::string, std::size_t> mesh_indices_;                     // into Manifest::meshes
  std::map<std::size_t, std::unordered_map<std::string, Placement>> placements_;  // by tensor dimensions, by text
};

}  // namespace

Manifest parse_manifest(const std::string& text, const std::string& where) {
  return ManifestParser(where).parse(text);
}

}  // namespace gradclip
