#pragma once
// A file that was just written, as the disk gives it back, against what was computed.

#include <cstdint>
#include <filesystem>
#include <string>

#include "gradclip/dump/manifest.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/dump/rank_file.hpp"

namespace gradclip {

/// Asks the system to forget what it has of the file in memory, reads it and compares. @pre it is synced
/// Errors: Error(resources) if it is not what `record` says; as checksum_of_file().
void require_written(const std::filesystem::path& path, const FileRecord& record);

/// The same for a part of it. @param what  it is, for messages  @param computed  XXH3-64 of the bytes in memory
void require_written(const PosixFile& file, std::uint64_t offset, std::uint64_t bytes, const std::string& what,
                     std::uint64_t computed);
void require_written(const RankFile& file, const StoredShard& shard, std::uint64_t computed);

}  // namespace gradclip
