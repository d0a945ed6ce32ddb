#pragma once
// A rank's part of another rank's gradient.

#include <cstdint>

#include "gradclip/dump/rank_file.hpp"

namespace gradclip {

/// Reads elements [first, first + count) of the shard `kept` from a gradient that holds them in its own order.
/// Errors: Error(bad_input) where it does not hold them; as RankFile::read.
void read_slice(const RankFile& file, const StoredShard& shard, const ShardLayout& kept, std::uint64_t first,
                std::uint64_t count, std::byte* to);

}  // namespace gradclip
