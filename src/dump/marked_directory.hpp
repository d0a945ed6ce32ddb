#pragma once
// Directories that say of themselves that gradclip made them, so that nothing else is ever removed. Inside this room.

#include <filesystem>
#include <functional>
#include <string>
#include <system_error>

namespace gradclip {

/// Whether there is a marker in it.
[[nodiscard]] bool is_marked(const std::filesystem::path& directory);
/// Whether gradclip made it, or nobody put anything into it. False for what is no directory.
[[nodiscard]] bool is_marked_or_empty(const std::filesystem::path& directory);

/// What the marker says. Empty if there is none, or it cannot be read.
[[nodiscard]] std::string marked_identity(const std::filesystem::path& directory);
/// Makes the marker, or has it say something else, durably. At no time is there something in the directory without a
/// marker beside it, if there was not before. Errors: Error(resources).
void mark_directory(const std::filesystem::path& directory, const std::string& identity);

/// Removes what is in it, but for the marker and what is to be kept.
void remove_entries(const std::filesystem::path& directory, std::error_code& error,
                    const std::function<bool(const std::filesystem::path&)>& is_kept);
void empty_marked(const std::filesystem::path& directory, std::error_code& error);
/// Removes the directory too, its marker last: whoever is killed or fails here leaves what the next run dares to
/// remove.
void remove_marked(const std::filesystem::path& directory);

}  // namespace gradclip
