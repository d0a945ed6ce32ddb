#include "gradclip/synth/synthetic_layout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <optional>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using Kind = Placement::Kind;

constexpr std::array<std::string_view, 7> kDimensions{"pp", "dp", "dp_replicate", "dp_shard", "cp", "tp", "ep"};
constexpr std::int64_t kMostRanks = std::int64_t{1} << 20;

[[noreturn]] void refuse_mesh(std::string found, std::string expected) {
  throw Error(ExitCode::usage,
              {.where = "--mesh", .found = std::move(found), .expected = std::move(expected), .advice = {}});
}

std::int64_t size_of_dimension(const MeshSizes& mesh, std::string_view name) {
  const auto found = std::find_if(mesh.begin(), mesh.end(), [&](const auto& d) { return d.first == name; });
  return found == mesh.end() ? 1 : found->second;
}

std::int64_t ranks_of(const MeshSizes& mesh) {
  std::int64_t ranks = 1;
  for (const auto& [name, size] : mesh) ranks *= name == "ep" ? 1 : size;
  return ranks;
}

Placement shard(std::int64_t dim) {
  return {.kind = Kind::shard, .dim = dim};
}

/// Where a stage's parameters are.
struct StageMeshes {
  std::optional<std::size_t> dense;  ///< empty: a stage is one rank, its tensors are plain
  std::optional<std::size_t> experts;
  std::vector<std::int32_t> ranks;
};

class LayoutBuilder {
 public:
  LayoutBuilder(const ModelDescription& model, std::int64_t layers, const MeshSizes& mesh, DType dtype)
      : model_(model), layers_(layers), mesh_(mesh), dtype_(dtype), stages_(size_of_dimension(mesh, "pp")) {}

  Manifest build() {
    manifest_.world_size = static_cast<std::int32_t>(ranks_of(mesh_));
    manifest_.rank_file_pattern = "rank_{rank:05d}.h5";
    manifest_.step = 0;
    manifest_.state = GradientState::before_clip;
    add_meshes();
    for (std::int64_t stage = 0; stage < stages_; ++stage) add_stage(stage);
    return std::move(manifest_);
  }

 private:
  void add_meshes() {
    std::vector<std::string> names;
    std::vector<std::int64_t> shape;
    for (const auto& [name, size] : mesh_) {
      if (name == "ep") continue;
      names.push_back(name);
      shape.push_back(size);
    }
    std::vector<std::int32_t> ranks(static_cast<std::size_t>(manifest_.world_size));
    std::iota(ranks.begin(), ranks.end(), 0);
    manifest_.meshes.emplace_back("world", names, shape, ranks);
    manifest_.device_mesh = 0;
    const DeviceMesh world = manifest_.meshes.front();
    const std::optional<std::size_t> pp = world.dimension("pp");
    for (std::int64_t stage = 0; stage < stages_; ++stage) {
      StageMeshes& meshes = of_stage_.emplace_back();
      std::vector<bool> varies(shape.size(), true);
      Coordinate at(shape.size(), 0);
      if (pp) {
        varies[*pp] = false;
        at[*pp] = stage;
      }
      meshes.ranks = world.ranks_along(varies, at);
      const std::string name = pp ? fmt::format("stage{}", stage) : "world";
      if (!pp) {
        meshes.dense = 0;
      } else if (shape.size() > 1) {
        std::vector<std::string> dim_names = names;
        std::vector<std::int64_t> sizes = shape;
        dim_names.erase(dim_names.begin() + static_cast<std::ptrdiff_t>(*pp));
        sizes.erase(sizes.begin() + static_cast<std::ptrdiff_t>(*pp));
        meshes.dense = manifest_.meshes.size();
        manifest_.meshes.emplace_back(name, dim_names, sizes, meshes.ranks);
      }
      if (!has_experts()) continue;
      const std::int64_t ep = size_of_dimension(mesh_, "ep");
      meshes.experts = manifest_.meshes.size();
      manifest_.moe_meshes.push_back(manifest_.meshes.size());
      manifest_.meshes.emplace_back(name + ".moe", std::vector<std::string>{"ep_shard", "ep"},
                                    std::vector<std::int64_t>{static_cast<std::int64_t>(meshes.ranks.size()) / ep, ep},
                                    meshes.ranks);
    }
  }

  [[nodiscard]] bool has_experts() const {
    return std::any_of(mesh_.begin(), mesh_.end(), [](const auto& d) { return d.first == "ep"; }) &&
           std::any_of(model_.parameters.begin(), model_.parameters.end(),
                       [](const ModelParameter& parameter) { return parameter.expert; });
  }

  void add_stage(std::int64_t stage) {
    const std::int64_t begin = layers_ * stage / stages_;
    const std::int64_t end = layers_ * (stage + 1) / stages_;
    const auto add_outer = [&](ModelParameter::Stage which) {
      for (const ModelParameter& parameter : model_.parameters) {
        if (parameter.stage == which) add(parameter, parameter.name, stage);
      }
    };
    if (stage == 0) add_outer(ModelParameter::Stage::first);
    for (std::int64_t layer = begin; layer < end; ++layer) {
      for (const ModelParameter& parameter : model_.parameters) {
        const bool here = parameter.stage == ModelParameter::Stage::layers && layer >= parameter.first_layer &&
                          (!parameter.last_layer || layer < *parameter.last_layer);
        if (!here) continue;
        std::string name = parameter.name;
        name.replace(name.find("{layer}"), 7, fmt::to_string(layer));
        add(parameter, std::move(name), stage);
      }
    }
    if (stage == stages_ - 1) add_outer(ModelParameter::Stage::last);
  }

  void add(const ModelParameter& parameter, std::string name, std::int64_t stage) {
    const StageMeshes& meshes = of_stage_[static_cast<std::size_t>(stage)];
    ParameterEntry& entry = manifest_.parameters.emplace_back();
    entry.dataset = link_name(name);
    entry.name = std::move(name);
    entry.shape = parameter.shape;
    entry.elements = 1;
    for (const std::int64_t extent : entry.shape) entry.elements *= static_cast<std::uint64_t>(extent);
    entry.dtype = dtype_;
    if (parameter.expert) entry.expert = true;
    const auto dimensions = static_cast<std::int64_t>(entry.shape.size());
    if (parameter.expert && meshes.experts) {
      entry.mesh = meshes.experts;
      entry.placements = {dimensions > 1 ? shard(1) : Placement{}, dimensions > 0 ? shard(0) : Placement{}};
    } else if (meshes.dense) {
      entry.mesh = meshes.dense;
      entry.placements = dense_placements(manifest_.meshes[*meshes.dense], parameter);
    } else {
      entry.ranks = meshes.ranks;
      entry.copies = Copies::replicated;
    }
  }

  static std::vector<Placement> dense_placements(const DeviceMesh& mesh, const ModelParameter& parameter) {
    const std::optional<std::size_t> tp = mesh.dimension("tp");
    std::vector<Placement> placements;
    for (std::size_t d = 0; d < mesh.dimensions(); ++d) {
      const std::string& name = mesh.dim_names()[d];
      if (name == "tp" && parameter.tp) {
        placements.push_back(shard(*parameter.tp));
      } else if (name == "dp_shard" && !parameter.shape.empty()) {
        // FSDP cuts what tensor parallelism left, wherever it stands in the mesh.
        const bool after = tp && *tp > d && parameter.tp == std::int64_t{0};
        placements.push_back(after ? Placement{.kind = Kind::strided_shard, .dim = 0, .split_factor = mesh.shape()[*tp]}
                                   : shard(0));
      } else {
        placements.push_back({});
      }
    }
    return placements;
  }

  const ModelDescription& model_;
  std::int64_t layers_;
  const MeshSizes& mesh_;
  DType dtype_;
  std::int64_t stages_;
  Manifest manifest_;
  std::vector<StageMeshes> of_stage_;
};

}  // namespace

MeshSizes parse_mesh_sizes(std::string_view text) {
  MeshSizes mesh;
  std::int64_t ranks = 1;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    const std::size_t equals = part.find('=');
    const std::string_view name = part.substr(0, equals);
    const std::string_view digits = equals == std::string_view::npos ? std::string_view() : part.substr(equals + 1);
    std::int64_t size = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), size);
    if (error != std::errc() || end != digits.data() + digits.size() || size < 1 || size > kMostRanks) {
      refuse_mesh(quoted(part), "NAME=SIZE, separated by commas");
    }
    if (std::find(kDimensions.begin(), kDimensions.end(), name) == kDimensions.end()) {
      refuse_mesh("the dimension " + quoted(name), fmt::format("one of {}", fmt::join(kDimensions, ", ")));
    }
    if (std::any_of(mesh.begin(), mesh.end(), [&](const auto& d) { return d.first == name; })) {
      refuse_mesh("the dimension " + quoted(name) + " stands twice", "each once");
    }
    mesh.emplace_back(name, size);
    if (name != "ep") ranks *= size;
    if (ranks > kMostRanks) refuse_mesh("more ranks than 2^20", "a smaller mesh");
  }
  if (std::all_of(mesh.begin(), mesh.end(), [](const auto& d) { return d.first == "ep"; })) {
    refuse_mesh("no dimension", "one of pp, dp, dp_replicate, dp_shard, cp, tp, such as dp_shard=1");
  }
  const std::int64_t stage_ranks = ranks / size_of_dimension(mesh, "pp");
  if (const std::int64_t ep = size_of_dimension(mesh, "ep"); stage_ranks % ep != 0) {
    refuse_mesh(fmt::format("ep={}", ep), fmt::format("a divisor of the {} ranks of a stage", stage_ranks));
  }
  return mesh;
}

Manifest synthetic_manifest(const ModelDescription& model, std::int64_t layers, const MeshSizes& mesh, DType dtype) {
  const std::int64_t stages = size_of_dimension(mesh, "pp");
  if (stages > layers)
    refuse_mesh(fmt::format("pp={}", stages), fmt::format("at most one stage for each of {} layers", layers));
  return LayoutBuilder(model, layers, mesh, dtype).build();
}

}  // namespace gradclip
