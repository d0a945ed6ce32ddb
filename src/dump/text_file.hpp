#pragma once
// Small text files that a user names on the command line: options, name maps, models, baselines, reports.

#include <cstddef>
#include <filesystem>
#include <string>

#include "gradclip/base/error.hpp"

namespace gradclip {

inline constexpr std::size_t kMostTextBytes = std::size_t{16} << 20;

/// The whole file. It may be a pipe, as a shell's process substitution makes one: what is read counts, not a size that
/// the system reports, and an endless device ends at the limit.
/// @param where  begins every message: "name map 'FILE'"
/// @param code   of a file that is missing, is a directory, or is too long
/// Errors: Error(code); as system_error() where it cannot be opened or read for other reasons.
[[nodiscard]] std::string read_text_file(const std::filesystem::path& file, const std::string& where, ExitCode code,
                                         std::size_t most_bytes = kMostTextBytes);

}  // namespace gradclip
