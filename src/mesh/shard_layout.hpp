#pragma once
// Which elements of a global tensor a recorded rank holds. Pure mathematics: no files, no processes.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "gradclip/mesh/device_mesh.hpp"
#include "gradclip/mesh/placement.hpp"
#include "gradclip/mesh/range_list.hpp"

namespace gradclip {

/// A dimension's ranges as a recorder wrote them: `global_ranges` is int64 [n, 3] of these.
struct DimensionRange {
  std::int64_t dimension = 0;
  IndexRange range;
};

/// The local shard of one recorded rank: for every tensor dimension a list of index ranges (one for a block; several
/// for a bare _StridedShard), and for Flat a range of the row-major flattening of that.
class ShardLayout {
 public:
  ShardLayout() = default;
  /// @param ranges  one list per tensor dimension, ascending and disjoint, each list's ranges non-empty, except that a
  ///                dimension of which nothing is held has an empty list or one empty range.
  /// @param flat    a range of the row-major flattening of `ranges`.
  /// Errors: Error(bad_input) for 2^63 elements or more, or a flat range outside the flattening.
  ShardLayout(std::vector<RangeList> ranges, std::optional<IndexRange> flat);

  /// Shape of the dataset: lengths per dimension, or one length for Flat.
  [[nodiscard]] const std::vector<std::int64_t>& local_shape() const noexcept { return local_shape_; }
  [[nodiscard]] std::uint64_t elements() const noexcept { return elements_; }
  [[nodiscard]] const std::vector<RangeList>& ranges() const noexcept { return ranges_; }
  [[nodiscard]] const std::optional<IndexRange>& flat() const noexcept { return flat_; }
  /// Whether it is one block of the global tensor: at most one range in every dimension, and not Flat (a range of a
  /// flattening is reported as such even where it happens to fill whole rows).
  [[nodiscard]] bool is_block() const noexcept;
  /// Where the block starts, one entry per dimension. An empty dimension's offset is where its range would start, or 0
  /// where it has no range at all. (PyTorch 2.15 says the global size there: compare offsets of non-empty shards only.)
  /// @pre is_block()
  [[nodiscard]] std::vector<std::int64_t> offset() const;

  /// Global coordinates of the local element at row-major position `position`. @pre position < elements()
  [[nodiscard]] std::vector<std::int64_t> global_index(std::uint64_t position) const;

 private:
  std::vector<RangeList> ranges_;
  std::optional<IndexRange> flat_;
  std::vector<std::int64_t> block_shape_;  // before Flat
  std::vector<std::int64_t> local_shape_;
  std::uint64_t elements_ = 0;
};

/// torch.chunk: part `index` of [0, length) cut into `parts`: pieces of ceil(length / parts) until the elements run
/// out.
/// @pre length >= 0, parts >= 1, index >= 0
[[nodiscard]] IndexRange chunk_range(std::int64_t length, std::int64_t parts, std::int64_t index) noexcept;

/// The layout that the placements give to the rank at `coordinate`.
///
/// Shards of one tensor dimension are applied in sharding order: mesh order, except that a _StridedShard whose split
/// factor is the product of the sizes of the first one or more shards that follow it in that order is applied after
/// them (FSDP2 over TP: TP's chunk first, then FSDP's chunk of it). A _StridedShard without such later shards takes the
/// index-list rule at its own place: split the current indices into split_factor chunks, take this coordinate's chunk
/// of each, one after another; ranges that touch are one range. (PyTorch: torch/distributed/tensor/_utils.py,
/// _explicit_order_placements and compute_local_shape_and_global_offset. PyTorch 2.15 uses the index-list rule for
/// every _StridedShard: the same slices where sizes divide evenly.)
///
/// Flat, on whichever mesh dimension, is applied after everything else. Time and memory are proportional to mesh and
/// tensor dimensions; where the index-list rule meets more than one range, time to the number of chunks and ranges,
/// too.
/// @param flat_range  this rank's range where a dimension is Flat.
/// @pre coordinate within the mesh
/// Errors: Error(bad_input) for a number of placements that is not the mesh's number of dimensions, a negative size or
/// 2^63 elements, a shard of a dimension that the tensor does not have, a split factor < 1 or one that makes more than
/// 2^20 chunks, more than one Flat, Flat without a range or a range without Flat, a flat range outside the flattening.
/// `where` begins the message.
[[nodiscard]] ShardLayout shard_layout(std::span<const std::int64_t> global_shape, const DeviceMesh& mesh,
                                       std::span<const Placement> placements, std::span<const std::int64_t> coordinate,
                                       std::optional<IndexRange> flat_range, const std::string& where);

/// A tensor that one rank holds whole.
[[nodiscard]] ShardLayout whole_layout(std::span<const std::int64_t> global_shape);

/// Whether the placements leave the uneven slices of this tensor open (a _StridedShard whose dimension does not divide
/// evenly: PyTorch versions differ), so that a recorded offset wins over the computed one.
/// Errors: Error(bad_input) for placements that shard_layout refuses.
[[nodiscard]] bool slices_are_ambiguous(std::span<const std::int64_t> global_shape, const DeviceMesh& mesh,
                                        std::span<const Placement> placements);

/// A layout from a recorder's own words. The local shape decides how far an offset's block reaches; -1 is read as the
/// global size where nothing is held (some PyTorch versions write it). Ranges of one dimension ascend without overlap;
/// a dimension without a range holds nothing. Errors: Error(bad_input) if it does not fit the global shape.
[[nodiscard]] ShardLayout layout_from_offset(std::span<const std::int64_t> global_shape,
                                             std::span<const std::int64_t> offset,
                                             std::span<const std::int64_t> local_shape, const std::string& where);
[[nodiscard]] ShardLayout layout_from_ranges(std::span<const std::int64_t> global_shape,
                                             std::span<const DimensionRange> ranges, const std::string& where);

/// How a mesh dimension's copies and addends meet: for a rank at `coordinate`, whether it is the copy that counts,
/// which ranks hold copies of the same values, and which hold the addends of the same slice.
struct ShardRole {
  bool counted;  ///< coordinate 0 in every Replicate dimension
  std::vector<std::int32_t>
      copies;  ///< ranks with the same values by declaration (Replicate dimensions vary), counted copy first
  std::vector<std::int32_t>
      addends;  ///< ranks along the Partial dimensions in coordinate order; only itself without Partial
};
[[nodiscard]] ShardRole shard_role(const DeviceMesh& mesh, std::span<const Placement> placements,
                                   std::span<const std::int64_t> coordinate);

}  // namespace gradclip
