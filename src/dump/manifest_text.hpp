#pragma once
// manifest.json as text: how the format spells what a command writes.

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gradclip/dump/manifest.hpp"

namespace gradclip {

/// Members of the manifest: key and JSON text.
using ManifestMembers = std::vector<std::pair<std::string, std::string>>;

/// DIRECTORY/manifest.json, unchecked. Errors: as read_manifest() for a directory without one, or with one that is too
/// large.
[[nodiscard]] std::string read_manifest_text(const std::filesystem::path& directory);

/// For a file of a dump that is no longer what was read of it. @param found  "was ..."  Errors: Error(bad_input),
/// always.
[[noreturn]] void refuse_changed_file(const std::filesystem::path& file, std::string found);

/// A manifest of these members, in their order, with its checksum; as file content.
[[nodiscard]] std::string manifest_text(const ManifestMembers& members);

/// The input's manifest with these members in place of its own (an empty text: neither), the others and the order of
/// all kept, new ones at the end, checksum made anew; as file content.
/// @param input  what was read of it. Its text is not kept: it can be large, and few commands write one
/// Errors: Error(bad_input) if the file is no longer the one that `input` was read from.
[[nodiscard]] std::string edited_manifest(const std::filesystem::path& input_directory, const Manifest& input,
                                          ManifestMembers members);

/// The value of "files".
[[nodiscard]] std::string files_text(const std::map<std::string, FileRecord>& files);

/// An entry of "parameters". @param mesh  of it; null for a plain tensor  @pre no flat_ranges, no gradient_placements
[[nodiscard]] std::string parameter_text(const ParameterEntry& entry, const DeviceMesh* mesh);

/// The value of "parameters" from such entries.
[[nodiscard]] std::string parameters_text(const std::vector<std::string>& entries);

/// A mesh's entry in "meshes", its key included: "NAME": {"dim_names": [...], "ranks": [...]}.
[[nodiscard]] std::string mesh_text(const DeviceMesh& mesh);

}  // namespace gradclip
