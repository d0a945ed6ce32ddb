#include "gradclip/training/slices.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

[[noreturn]] void refuse(bool own_slice, const std::string& where) {
  if (!own_slice) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = "it does not hold what another rank keeps of the sum",
                                      .expected = "a gradient of the parameter's slices",
                                      .advice = {}});
  }
  throw Error(ExitCode::bad_input,
              {.where = where,
               .found = "the slice that was recorded with it is not the one that its placements give",
               .expected = "the placements' slices, by which OUT is cut",
               .advice = "gradclip merge makes a dump of one rank of each microbatch, which accumulate takes"});
}

/// @param own_slice  whether the layout is the recorder's word
/// @return position of the global index in the shard, and how many elements of the last dimension follow it there
std::pair<std::uint64_t, std::uint64_t> find_in(const ShardLayout& layout, bool own_slice,
                                                const std::vector<std::int64_t>& index, const std::string& where) {
  std::uint64_t position = 0, following = 1;
  for (std::size_t d = 0; d < index.size(); ++d) {
    const RangeList& ranges = layout.ranges()[d];
    if (!ranges.holds(index[d])) refuse(own_slice, where);
    const std::int64_t found = ranges.count_below(index[d]);
    following = static_cast<std::uint64_t>(ranges.at(found).range.end - index[d]);
    position = position * static_cast<std::uint64_t>(ranges.length()) + static_cast<std::uint64_t>(found);
  }
  return {position, following};
}

}  // namespace

void read_slice(const RankFile& file, const StoredShard& shard, const ShardLayout& kept, std::uint64_t first,
                std::uint64_t count, std::byte* to) {
  const std::size_t size = size_of(shard.dtype);
  if (shard.layout.ranges() == kept.ranges()) {
    file.read(shard, first, count, to);
    return;
  }
  std::vector<RankFile::Piece> pieces;
  for (std::uint64_t i = 0; i < count;) {
    const std::vector<std::int64_t> index = kept.global_index(first + i);
    const std::string where = file.path().string() + ", " + printable(shard.dataset);
    const auto [position, run] = find_in(shard.layout, shard.own_slice, index, where);
    const std::uint64_t length = std::min({run, find_in(kept, false, index, where).second, count - i});
    RankFile::Piece* last = pieces.empty() ? nullptr : &pieces.back();
    if (last != nullptr && last->first + last->count == position) {
      last->count += length;
    } else {
      pieces.push_back({&shard, position, length, to + i * size});
    }
    i += length;
  }
  file.read(pieces);
}

}  // namespace gradclip
