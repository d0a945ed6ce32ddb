#pragma once
// /packed/index: which part of /packed/<dtype> is which parameter's.

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "gradclip/base/dtype.hpp"
#include "gradclip/mesh/shard_layout.hpp"

namespace gradclip {

/// Alignment of each shard within its dataset, in bytes.
inline constexpr std::uint64_t kPackedAlignment = 64;

/// {"dtype", "offset", "shape", "xxh3_64"} and, where they are needed, "global_offset", "global_ranges", "scale_inv"
/// with the meaning of the attributes of these names.
struct PackedShard {
  DType dtype = DType::float32;
  std::uint64_t offset = 0;  ///< in elements
  std::vector<std::int64_t> shape;
  std::uint64_t elements = 0;
  std::optional<std::uint64_t> xxh3_64;
  std::optional<std::vector<std::int64_t>> global_offset;
  std::optional<std::vector<DimensionRange>> global_ranges;
  std::optional<float> scale_inv;
};

using PackedIndex = std::unordered_map<std::string, PackedShard>;

/// Errors: Error(bad_input) beginning with `where`: as parse_json(); an offset that is not a multiple of the alignment;
/// shards of one type that overlap.
[[nodiscard]] PackedIndex parse_packed_index(const std::string& text, const std::string& where);

/// The index with new checksums, keys in their order, everything else as it is spelled.
[[nodiscard]] std::string rewritten_packed_index(const std::string& text,
                                                 const std::unordered_map<std::string, std::uint64_t>& checksums);

}  // namespace gradclip
