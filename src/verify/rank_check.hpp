#pragma once
// One recorded rank's file against the manifest: whether everything is there, of the right form, readable, and what was
// recorded.

#include <cstdint>
#include <vector>

#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/verify/fault.hpp"

namespace gradclip {

/// A shard whose own word on its slice (global_ranges, global_offset) gives it another number of elements than the
/// placements do. Trivially copyable.
struct OddShard {
  std::uint32_t parameter = 0;
  std::int32_t rank = 0;
  std::uint64_t elements = 0;
};

/// A shard that cannot be worked on, or whose gradient is None. Trivially copyable.
struct ShardName {
  std::uint32_t parameter = 0;
  std::int32_t rank = 0;

  friend auto operator<=>(const ShardName&, const ShardName&) = default;
};

struct RankCheck {
  std::vector<Fault> faults;
  bool missing = false;               ///< there is no such file
  bool readable = false;              ///< false: nothing of the file can be worked on
  std::vector<ShardName> unusable;    ///< of a readable file, ascending
  std::vector<OddShard> odd;          ///< ascending by parameter
  std::vector<ShardName> none;        ///< of parameters with an addend of max, min or product
  bool file_checksum = false;         ///< whether the manifest has one
  bool file_compared = false;         ///< whether the file's own could be formed and was compared with that
  std::uint64_t shards = 0;           ///< that were found
  std::uint64_t shard_checksums = 0;  ///< of them with a checksum of their own
};

/// Whether the gradient has a Partial dimension where a missing addend cannot count as 0.
[[nodiscard]] bool needs_every_addend(const ParameterEntry& parameter);

/// Reads the whole file if the manifest has its checksum, opens it, finds every shard. Shards are read where the file's
/// checksum does not vouch for them, to say where the damage is, and where they are not plain bytes (a damaged chunk
/// shows only then). Thread-safe. Never throws Error(bad_input): that becomes a fault. Errors: Error(resources).
[[nodiscard]] RankCheck check_rank(DumpReader& dump, std::int32_t rank);

/// The check of a file that is not to be opened: its bytes against the manifest's record, and `why` as a fault.
[[nodiscard]] RankCheck refused_rank(DumpReader& dump, std::int32_t rank, const ErrorText& why);

}  // namespace gradclip
