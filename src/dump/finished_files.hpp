#pragma once
// Notes on files of an unfinished output that are whole, so that a later run can take them over.

#include <filesystem>
#include <optional>
#include <string>

#include "gradclip/dump/manifest.hpp"

namespace gradclip {

struct FinishedFile {
  FileRecord record;
  std::string note;  ///< one line: what the run found out while it wrote the file
};

/// Where the notes lie.
[[nodiscard]] std::filesystem::path finished_files_directory(const std::filesystem::path& partial);

/// Notes that the file of this name is whole, and syncs the note. @pre the file is synced, its checksum known
/// Errors: Error(resources).
void note_finished_file(const std::filesystem::path& partial, const std::string& name, const FinishedFile& file);

/// Reads the file and compares it with its note. Empty for whatever is not what the note says, or has none: then it is
/// to be written anew. @param made  the directory it lies in  Errors: Error(resources) for a file that cannot be read.
[[nodiscard]] std::optional<FinishedFile> finished_file(const std::filesystem::path& partial,
                                                        const std::filesystem::path& made, const std::string& name);

}  // namespace gradclip
