#pragma once
// manifest.json as checked values (docs/format.md). Every number in it is untrusted and checked here.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/base/dtype.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/mesh/device_mesh.hpp"
#include "gradclip/mesh/placement.hpp"
#include "gradclip/mesh/shard_layout.hpp"

namespace gradclip {

inline constexpr const char* kManifestName = "manifest.json";

/// A parameter's name as the name of an HDF5 link: %, / and a leading . percent-encoded.
[[nodiscard]] std::string link_name(const std::string& name);

/// How ranks that hold the same plain tensor relate.
enum class Copies : std::uint8_t { undeclared, replicated, distinct };

enum class GradientState : std::uint8_t { before_scale, before_clip, after_clip };
[[nodiscard]] std::string_view name(GradientState state) noexcept;

/// Where synchronisation windows end: at the step's last microbatch, at every one, at every pipeline schedule step's
/// last.
enum class Synchronisation : std::uint8_t { deferred, every, schedule };
[[nodiscard]] std::string_view name(Synchronisation sync) noexcept;
[[nodiscard]] std::optional<Synchronisation> parse_synchronisation(std::string_view text) noexcept;

/// "microbatch": which of a step's microbatches the gradients are of, and the flags while its backward ran. A flag that
/// was null or missing is empty.
struct MicrobatchRecord {
  std::int64_t index = 0;
  std::int64_t count = 1;
  std::optional<bool> first_microbatch;  ///< empty: unset, so that no FP8 weights were cached
  std::optional<bool> optimizer_step;
  std::optional<bool> synchronised;           ///< whether a reduction followed this backward
  std::optional<std::int64_t> schedule_step;  ///< of pipeline parallelism, >= 0
};

/// "accumulation": how the recorded step accumulates. None of the types is float8.
struct AccumulationRecord {
  std::optional<Synchronisation> sync;
  std::optional<DType> compute_dtype;
  std::optional<DType> reduce_dtype;
  std::optional<DType> storage_dtype;

  [[nodiscard]] bool operator==(const AccumulationRecord&) const = default;
};

/// One entry of "parameters".
struct ParameterEntry {
  std::string name;
  std::string dataset;       ///< link name in the rank file: "dataset" as it is, or link_name(name)
  bool own_dataset = false;  ///< whether the entry says "dataset"
  std::int64_t model_part = 0;
  std::vector<std::int64_t> shape;  ///< global; each >= 0, the product below 2^62
  std::uint64_t elements = 0;       ///< product of shape
  DType dtype = DType::float32;
  std::optional<std::size_t> mesh;  ///< index into Manifest::meshes; empty: a plain tensor
  /// Which of several DeviceMesh objects with these ranks and names it was. The reference groups by the object, which
  /// changes the roundings of its totals and nothing else.
  std::int64_t mesh_object = 0;
  std::vector<Placement> placements;                          ///< the parameter's, one per mesh dimension
  std::optional<std::vector<Placement>> gradient_placements;  ///< where the gradient's differ
  std::vector<std::int32_t> ranks;                            ///< plain tensors: who holds one, ascending
  Copies copies = Copies::undeclared;
  std::optional<bool> expert;
  std::optional<std::string> tied;
  std::map<std::int32_t, IndexRange> flat_ranges;
  std::optional<DType> reduce_dtype;   ///< where it differs from "accumulation"; not float8
  std::optional<DType> storage_dtype;  ///< likewise

  /// The placements of the recorded gradient.
  [[nodiscard]] const std::vector<Placement>& layout() const noexcept {
    return gradient_placements ? *gradient_placements : placements;
  }
  [[nodiscard]] bool has_partial() const noexcept;  ///< whether layout() has a Partial dimension
  /// Whether it is a plain tensor of which each rank has one of its own. Undeclared, experts are taken for that.
  [[nodiscard]] bool is_distinct(bool is_expert) const noexcept {
    return !mesh && (copies == Copies::distinct || (copies == Copies::undeclared && is_expert));
  }
  /// What /none and /packed/index call it: the name, or "dataset" where the entry has its own.
  [[nodiscard]] const std::string& recorded_name() const noexcept { return own_dataset ? dataset : name; }
};

/// "training": what the step passed to its own clipping and what it logged. A key that was null or missing is empty.
struct TrainingRecord {
  std::optional<double> max_grad_norm;
  std::optional<double> norm_type;  ///< may be infinity
  std::optional<bool> pp_enabled;
  std::optional<std::string> pp_axis_name;
  std::optional<std::string> ep_axis_name;
  std::optional<std::int64_t> num_label_tokens;
  std::optional<std::int64_t> dp_group_size;
  std::optional<std::int64_t> expert_tp_replication_factor;
  std::optional<bool> foreach;
  std::optional<bool> use_torch_clip_grad_norm;
  std::optional<std::int64_t> ignore_index;
  std::optional<double> grad_norm;  ///< as logged; may be NaN or infinity
};

/// Size and XXH3-64 of a whole rank file.
struct FileRecord {
  std::uint64_t bytes = 0;
  std::optional<std::uint64_t> xxh3_64;
};

struct Manifest {
  std::optional<std::int64_t> step;
  std::optional<MicrobatchRecord> microbatch;
  AccumulationRecord accumulation;
  GradientState state = GradientState::before_scale;
  std::int32_t world_size = 0;
  std::string rank_file_pattern;
  std::vector<DeviceMesh> meshes;
  std::optional<std::size_t> device_mesh;  ///< index into meshes
  std::vector<std::size_t> moe_meshes;     ///< indices into meshes, possibly none
  std::vector<ParameterEntry> parameters;
  TrainingRecord training;
  std::map<std::string, FileRecord> files;
  std::string producer;  ///< for people: "gradclip_record 0.1.0 (torch 2.9)"
  bool has_checksum = false;
  bool merged = false;              ///< `merge` made it: what followed from the job's meshes is gone
  std::uint64_t text_checksum = 0;  ///< XXH3-64 of the whole text: the same for whoever read the same manifest
  /// From examine_manifest() alone: entries that were refused, with name and dataset where they could be read. What a
  /// rank file holds of them is no surplus.
  std::vector<ParameterEntry> refused;

  /// Recorded ranks that hold the parameter, ascending.
  [[nodiscard]] std::vector<std::int32_t> holders(const ParameterEntry& parameter) const;
  [[nodiscard]] bool holds(const ParameterEntry& parameter, std::int32_t rank) const;
  [[nodiscard]] std::string rank_file_name(std::int32_t rank) const;

  /// Whether the parameter is an expert's (docs/arithmetic.md): a mesh with the ep axis, marked "expert", or a name
  /// that matches Transformer Engine's grouped experts. @param ep_axis_name empty: no axis.
  [[nodiscard]] bool is_expert(const ParameterEntry& parameter, const std::string& ep_axis_name) const;

  /// The layout that the manifest gives rank's shard. @pre holds(parameter, rank)
  [[nodiscard]] ShardLayout layout(const ParameterEntry& parameter, std::int32_t rank) const;
  /// The copy and addend groups of rank's shard; for plain tensors from "copies" (undeclared: distinct for experts,
  /// else replicated). @pre holds(parameter, rank)
  [[nodiscard]] ShardRole role(const ParameterEntry& parameter, std::int32_t rank, bool expert) const;
};

/// Reads and checks DIRECTORY/manifest.json.
/// Errors: Error(bad_input): no such directory; an unfinished dump (no manifest; rank_*.json fragments or a *.tmp are
/// named as what they are); JSON that is malformed, deeper than 64, larger than 1 GiB, with duplicate keys or bare NaN;
/// a wrong format or version; any value of the wrong type or range, named by its path in the document
/// ("parameters[3].shape[0]"); unknown placements, meshes, ranks outside world_size or outside the mesh, a rank twice
/// in a mesh, the same parameter twice on one rank; a checksum that does not match. Error(resources) if it cannot be
/// read.
[[nodiscard]] Manifest read_manifest(const std::filesystem::path& directory);

/// The same for text that is in memory already. @param where  begins every message.
[[nodiscard]] Manifest parse_manifest(const std::string& text, const std::string& where);

/// A manifest with all that is wrong with it, as far as one problem does not follow from another.
struct ManifestReading {
  /// Without the meshes, parameters, files and numbers that are wrong, and parameters on such meshes. Empty if it is no
  /// JSON, of another format, or does not say which rank files there are.
  std::optional<Manifest> manifest;
  /// Every one with a kind: "unfinished", "checksum", "placement", "manifest".
  std::vector<ErrorText> problems;
  bool complete = false;  ///< every mesh, parameter and training number is in it
};

/// read_manifest() for `verify`, which goes on after a problem.
/// Errors: Error(bad_input) where there is no dump at all: no such directory, nothing of a dump in it;
/// Error(resources).
[[nodiscard]] ManifestReading examine_manifest(const std::filesystem::path& directory);

/// The same for text that is in memory already. Errors: none of the input's.
[[nodiscard]] ManifestReading examine_manifest(const std::string& text, const std::string& where);

/// What the clip command adds to the input's manifest.
struct ManifestChanges {
  GradientState state = GradientState::after_clip;
  std::map<std::string, FileRecord> files;
  /// The "clip" record as JSON text: {"version", "total", "coefficient", ...}.
  std::string clip_record;
};

/// The input's manifest with the changes, unknown keys kept, the order of keys kept, checksum made anew; as file
/// content. Errors: as edited_manifest().
[[nodiscard]] std::string rewritten_manifest(const std::filesystem::path& input_directory, const Manifest& input,
                                             const ManifestChanges& changes);

/// JSON numbers as the format writes them, and as Python spells them: the shortest digits that read back as the same
/// float64, "1.0", "1e-06", "1e+16"; "nan", "inf", "-inf" as strings (with their quotes).
[[nodiscard]] std::string json_number(double value);

}  // namespace gradclip
