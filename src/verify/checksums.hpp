#pragma once
// Whole rank files against the checksums that the manifest has of them.

#include <cstdint>
#include <filesystem>
#include <optional>

#include "gradclip/base/error.hpp"
#include "gradclip/norm/total_norm.hpp"

namespace gradclip {

/// Reads the rank's file once and compares size and XXH3-64 with the manifest's record.
/// @return what is wrong, of kind "checksum", without advice; empty if it agrees or there is no record.
/// Errors: as checksum_of_file(): the file has to exist.
[[nodiscard]] std::optional<ErrorText> check_whole_file(const std::filesystem::path& directory,
                                                        const Manifest& manifest, std::int32_t rank);

/// --verify of the commands that read a dump: every recorded rank's file is what was recorded, before the work begins.
/// Each
/// process checks its own recorded ranks, up to `threads` files at once. Collective.
/// Errors: Error(bad_input) for a file that differs, and where the manifest has no checksum for one, or of itself.
void require_recorded_files(Run& run, std::size_t threads);

}  // namespace gradclip
