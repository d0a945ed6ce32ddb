#include "gradclip/mesh/shard_layout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using Kind = Placement::Kind;

// A split factor is a product of mesh extents, so a real one stays far below; a manifest's may be 2^60.
constexpr std::int64_t kMostChunks = std::int64_t{1} << 20;

std::string list(std::span<const std::int64_t> numbers) {
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

[[noreturn]] void refuse(const std::string& where, std::string found, std::string expected) {
  throw Error(
      ExitCode::bad_input,
      {.where = where, .found = std::move(found), .expected = std::move(expected), .advice = {}, .kind = "placement"});
}

/// Product of the extents, empty if it does not fit into 63 bits. An extent of 0 makes it 0 whatever the others are.
std::optional<std::int64_t> product(std::span<const std::int64_t> extents) noexcept {
  if (std::find(extents.begin(), extents.end(), 0) != extents.end()) return 0;
  std::int64_t result = 1;
  for (const std::int64_t extent : extents) {
    if (__builtin_mul_overflow(result, extent, &result)) return std::nullopt;
  }
  return result;
}

void check_shape(std::span<const std::int64_t> shape, const std::string& where) {
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t extent) { return extent < 0; })) {
    refuse(where, "shape " + list(shape), "sizes of at least 0");
  }
  if (!product(shape)) refuse(where, "shape " + list(shape), "fewer than 2^63 elements");
}

/// The indices at these positions of a list, behind those of another.
void append_part(const RangeList& ranges, IndexRange positions, RangeList& to) {
  while (positions.size() > 0) {
    const auto [range, before] = ranges.at(positions.begin);
    const std::int64_t begin = range.begin + (positions.begin - before);
    const std::int64_t length = std::min(range.end - begin, positions.size());
    to.append({begin, begin + length});
    positions.begin += length;
  }
}

/// One mesh dimension's cut. chunks > 1 only for the index-list rule.
struct Cut {
  std::size_t mesh_dimension;
  std::int64_t tensor_dimension;
  std::int64_t chunks;
};

/// The cuts in sharding order. Mesh dimensions of size 1 cut nothing and are left out, so that 64 entries are enough
/// for any mesh whose ranks fit into memory.
class ShardingOrder {
 public:
  ShardingOrder(const DeviceMesh& mesh, std::span<const Placement> placements) {
    for (std::size_t m = placements.size(); m-- > 0;) {
      const Placement& placement = placements[m];
      if (mesh.shape()[m] == 1) continue;
      if (placement.kind == Kind::shard) insert(0, {m, placement.dim, 1});
      if (placement.kind == Kind::strided_shard) insert_strided(mesh, m, placement);
    }
  }

  [[nodiscard]] std::span<const Cut> cuts() const noexcept { return {cuts_.data(), size_}; }

 private:
  void insert_strided(const DeviceMesh& mesh, std::size_t m, const Placement& placement) {
    std::int64_t product = 1;
    std::size_t before = 0;
    while (product < placement.split_factor && before < size_) {
      const Cut& cut = cuts_[before++];
      if (cut.tensor_dimension != placement.dim) continue;
      if (cut.chunks > 1) break;
      product *= mesh.shape()[cut.mesh_dimension];
    }
    if (product == placement.split_factor) {
      insert(before, {m, placement.dim, 1});
    } else {
      insert(0, {m, placement.dim, placement.split_factor});
    }
  }

  void insert(std::size_t at, Cut cut) {
    GRADCLIP_CHECK(size_ < cuts_.size(), "a mesh of more than 2^64 ranks");
    std::copy_backward(cuts_.begin() + at, cuts_.begin() + size_, cuts_.begin() + size_ + 1);
    cuts_[at] = cut;
    ++size_;
  }

  std::array<Cut, 64> cuts_;
  std::size_t size_ = 0;
};

void check_placements(std::span<const std::int64_t> global_shape, const DeviceMesh& mesh,
                      std::span<const Placement> placements, const std::string& where) {
  if (placements.size() != mesh.dimensions()) {
    refuse(where, fmt::format("{} placements on mesh {}", placements.size(), quoted(mesh.name())),
           fmt::format("one for each of its {} dimensions", mesh.dimensions()));
  }
  const auto dimensions = static_cast<std::int64_t>(global_shape.size());
  for (const Placement& placement : placements) {
    if (placement.kind != Kind::shard && placement.kind != Kind::strided_shard) continue;
    if (placement.dim < 0 || placement.dim >= dimensions) {
      refuse(where, fmt::format("{} of a tensor of shape {}", to_string(placement), list(global_shape)),
             dimensions == 0 ? std::string("no shard of a tensor without dimensions")
                             : fmt::format("a dimension from 0 to {}", dimensions - 1));
    }
    if (placement.kind == Kind::strided_shard && placement.split_factor < 1) {
      refuse(where, to_string(placement), "a split factor of at least 1");
    }
  }
}

void check_flat(std::span<const Placement> placements, const std::optional<IndexRange>& flat_range,
                const std::string& where) {
  const auto flats = std::count_if(placements.begin(), placements.end(),
                                   [](const Placement& placement) { return placement.kind == Kind::flat; });
  if (flats > 1) refuse(where, fmt::format("Flat() on {} mesh dimensions", flats), "at most one");
  if (flats == 1 && !flat_range)
    refuse(where, "Flat() without a flat range", "a range for each rank in \"flat_ranges\"");
  if (flats == 0 && flat_range) refuse(where, "a flat range without Flat()", "Flat() among the placements");
}

/// The part of `ranges` that coordinate `index` of `parts` gets. An empty part keeps the place where it would start.
void apply(RangeList& ranges, std::int64_t chunks, std::int64_t parts, std::int64_t index, const std::string& where) {
  const std::int64_t length = ranges.length();
  const bool is_one = ranges.progressions().size() == 1 && ranges.progressions()[0].count == 1;
  const std::int64_t begin = ranges.front().begin, end = ranges.back().end;
  if (is_one && chunks == 1) {
    const IndexRange part = chunk_range(length, parts, index);
    ranges = {{begin + part.begin, begin + part.end}};
    return;
  }
  const std::int64_t chunk = length / chunks + (length % chunks != 0);
  const std::int64_t used = length == 0 ? 0 : (length - 1) / chunk + 1;
  if (used > kMostChunks) {
    refuse(where, fmt::format("a split factor of {} on {} indices", chunks, length),
           fmt::format("at most {} chunks", kMostChunks));
  }
  RangeList result;
  const auto part_of_chunk = [&](std::int64_t c) {
    const IndexRange whole = chunk_range(length, chunks, c);
    const IndexRange part = chunk_range(whole.size(), parts, index);
    return IndexRange{whole.begin + part.begin, whole.begin + part.end};
  };
  if (is_one && used > 0) {  // all chunks but the last are alike
    const IndexRange first = part_of_chunk(0), last = part_of_chunk(used - 1);
    if (used > 1) result.append({begin + first.begin, begin + first.end}, chunk, used - 1);
    result.append({begin + last.begin, begin + last.end});
  } else {
    for (std::int64_t c = 0; c < used; ++c) append_part(ranges, part_of_chunk(c), result);
  }
  if (result.empty()) result.push_back({end, end});
  ranges = std::move(result);
}

}  // namespace

ShardLayout::ShardLayout(std::vector<RangeList> ranges, std::optional<IndexRange> flat)
    : ranges_(std::move(ranges)), flat_(flat) {
  local_shape_.reserve(ranges_.size());
  for (const RangeList& dimension : ranges_) local_shape_.push_back(dimension.length());
  const std::optional<std::int64_t> elements = product(local_shape_);
  if (!elements) refuse("shard", "local shape " + list(local_shape_), "fewer than 2^63 elements");
  elements_ = static_cast<std::uint64_t>(*elements);
  if (!flat_) return;

  if (flat_->begin < 0 || flat_->end < flat_->begin || flat_->end > *elements) {
    refuse("shard", fmt::format("flat range [{}, {})", flat_->begin, flat_->end),
           fmt::format("a range within [0, {})", *elements));
  }
  block_shape_ = std::exchange(local_shape_, {flat_->size()});
  elements_ = static_cast<std::uint64_t>(flat_->size());
}

bool ShardLayout::is_block() const noexcept {
  return !flat_ &&
         std::all_of(ranges_.begin(), ranges_.end(), [](const RangeList& ranges) { return ranges.size() <= 1; });
}

std::vector<std::int64_t> ShardLayout::offset() const {
  GRADCLIP_CHECK(is_block(), "the offset of a shard that is not one block");
  std::vector<std::int64_t> offset;
  offset.reserve(ranges_.size());
  for (const RangeList& ranges : ranges_) offset.push_back(ranges.empty() ? 0 : ranges.front().begin);
  return offset;
}

std::vector<std::int64_t> ShardLayout::global_index(std::uint64_t position) const {
  GRADCLIP_CHECK(position < elements_, "an element outside the shard");
  auto rest = static_cast<std::int64_t>(position) + (flat_ ? flat_->begin : 0);
  const std::vector<std::int64_t>& shape = flat_ ? block_shape_ : local_shape_;
  std::vector<std::int64_t> index(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    const std::int64_t along = rest % shape[d];
    rest /= shape[d];
    const auto [range, before] = ranges_[d].at(along);
    index[d] = range.begin + (along - before);
  }
  return index;
}

IndexRange chunk_range(std::int64_t length, std::int64_t parts, std::int64_t index) noexcept {
  const std::int64_t chunk = length / parts + (length % parts != 0);
  std::int64_t begin = 0;
  if (__builtin_mul_overflow(chunk, index, &begin) || begin > length) begin = length;
  return {begin, begin + std::min(chunk, length - begin)};
}

ShardLayout shard_layout(std::span<const std::int64_t> global_shape, const DeviceMesh& mesh,
                         std::span<const Placement> placements, std::span<const std::int64_t> coordinate,
                         std::optional<IndexRange> flat_range, const std::string& where) {
  check_shape(global_shape, where);
  check_placements(global_shape, mesh, placements, where);
  check_flat(placements, flat_range, where);
  GRADCLIP_CHECK(coordinate.size() == mesh.dimensions(), "a coordinate of another mesh");
  for (std::size_t m = 0; m < coordinate.size(); ++m) {
    GRADCLIP_CHECK(coordinate[m] >= 0 && coordinate[m] < mesh.shape()[m], "a coordinate outside the mesh");
  }

  std::vector<RangeList> ranges;
  ranges.reserve(global_shape.size());
  for (const std::int64_t extent : global_shape) ranges.push_back({{0, extent}});
  const ShardingOrder order(mesh, placements);
  for (const Cut& cut : order.cuts()) {
    apply(ranges[static_cast<std::size_t>(cut.tensor_dimension)], cut.chunks, mesh.shape()[cut.mesh_dimension],
          coordinate[cut.mesh_dimension], where);
  }

  if (flat_range) {
    std::vector<std::int64_t> block;
    for (const RangeList& dimension : ranges) block.push_back(dimension.length());
    const std::int64_t elements = product(block).value();  // fits: no more than the global shape's
    if (flat_range->begin < 0 || flat_range->end < flat_range->begin || flat_range->end > elements) {
      refuse(where, fmt::format("flat range [{}, {})", flat_range->begin, flat_range->end),
             fmt::format("a range within [0, {}), the flattening of what the other placements leave", elements));
    }
  }
  return {std::move(ranges), flat_range};
}

ShardLayout whole_layout(std::span<const std::int64_t> global_shape) {
  check_shape(global_shape, "tensor");
  std::vector<RangeList> ranges;
  ranges.reserve(global_shape.size());
  for (const std::int64_t extent : global_shape) ranges.push_back({{0, extent}});
  return {std::move(ranges), std::nullopt};
}

bool slices_are_ambiguous(std::span<const std::int64_t> global_shape, const DeviceMesh& mesh,
                          std::span<const Placement> placements) {
  check_placements(global_shape, mesh, placements, "placements");
  const ShardingOrder order(mesh, placements);
  for (std::size_t d = 0; d < global_shape.size(); ++d) {
    bool is_strided = false;
    for (std::size_t m = 0; m < placements.size(); ++m) {
      is_strided = is_strided || (placements[m].kind == Kind::strided_shard && placements[m].split_factor > 1 &&
                                  placements[m].dim == static_cast<std::int64_t>(d) && mesh.shape()[m] > 1);
    }
    if (!is_strided) continue;
    std::int64_t length = global_shape[d];
    for (const Cut& cut : order.cuts()) {
      if (cut.tensor_dimension != static_cast<std::int64_t>(d)) continue;
      const std::int64_t parts = mesh.shape()[cut.mesh_dimension];
      if (length % parts != 0 || length / parts % cut.chunks != 0) return true;
      length /= parts;
    }
  }
  return false;
}

ShardLayout layout_from_offset(std::span<const std::int64_t> global_shape, std::span<const std::int64_t> offset,
                               std::span<const std::int64_t> local_shape, const std::string& where) {
  check_shape(global_shape, where);
  const std::size_t dimensions = global_shape.size();
  if (offset.size() != dimensions || local_shape.size() != dimensions) {
    refuse(where, fmt::format("offset {} with local shape {}", list(offset), list(local_shape)),
           fmt::format("{} numbers in each, for global shape {}", dimensions, list(global_shape)));
  }
  std::vector<RangeList> ranges;
  ranges.reserve(dimensions);
  for (std::size_t d = 0; d < dimensions; ++d) {
    // Some PyTorch versions say -1 for where an empty strided shard starts.
    const std::int64_t begin = local_shape[d] == 0 && offset[d] == -1 ? global_shape[d] : offset[d];
    if (begin < 0 || local_shape[d] < 0 || begin > global_shape[d] || local_shape[d] > global_shape[d] - begin) {
      refuse(where, fmt::format("offset {} with local shape {}", list(offset), list(local_shape)),
             "a block within global shape " + list(global_shape));
    }
    ranges.push_back({{begin, begin + local_shape[d]}});
  }
  return {std::move(ranges), std::nullopt};
}

ShardLayout layout_from_ranges(std::span<const std::int64_t> global_shape, std::span<const DimensionRange> ranges,
                               const std::string& where) {
  check_shape(global_shape, where);
  const auto dimensions = static_cast<std::int64_t>(global_shape.size());
  std::vector<RangeList> lists(global_shape.size());
  std::vector<std::int64_t> ends(global_shape.size(), 0);
  for (const auto& [dimension, range] : ranges) {
    if (dimension < 0 || dimension >= dimensions) {
      refuse(where, fmt::format("a range of dimension {}", dimension),
             fmt::format("dimensions of global shape {}", list(global_shape)));
    }
    const auto d = static_cast<std::size_t>(dimension);
    if (range.begin < ends[d] || range.end < range.begin || range.end > global_shape[d]) {
      refuse(where, fmt::format("range [{}, {}) of dimension {}", range.begin, range.end, dimension),
             fmt::format("ascending ranges without overlap, within [0, {})", global_shape[d]));
    }
    ends[d] = range.end;
    lists[d].append(range);
  }
  for (std::size_t d = 0; d < lists.size(); ++d) {
    if (lists[d].empty()) lists[d].push_back({ends[d], ends[d]});
  }
  return {std::move(lists), std::nullopt};
}

ShardRole shard_role(const DeviceMesh& mesh, std::span<const Placement> placements,
                     std::span<const std::int64_t> coordinate) {
  GRADCLIP_CHECK(placements.size() == mesh.dimensions() && coordinate.size() == mesh.dimensions(),
                 "placements or a coordinate of another mesh");
  std::vector<bool> is_copied(placements.size());
  std::vector<bool> is_added(placements.size());
  bool counted = true;
  for (std::size_t m = 0; m < placements.size(); ++m) {
    is_copied[m] = placements[m].kind == Kind::replicate;
    is_added[m] = placements[m].kind == Kind::partial;
    counted = counted && (!is_copied[m] || coordinate[m] == 0);
  }
  return {.counted = counted,
          .copies = mesh.ranks_along(is_copied, coordinate),
          .addends = mesh.ranks_along(is_added, coordinate)};
}

}  // namespace gradclip
