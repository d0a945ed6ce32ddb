#pragma once
// Which part of its tensor a stored shard is: the placements' word and the recorder's.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/dump/manifest.hpp"

namespace gradclip {

/// What a shard says of itself.
struct RecordedSlice {
  std::vector<std::int64_t> shape;  ///< of the dataset
  std::optional<std::vector<std::int64_t>> global_offset;
  std::optional<std::vector<DimensionRange>> global_ranges;
};

struct RecordedLayout {
  ShardLayout layout;
  bool own_slice = false;  ///< whether the recorder's word decided, and not the placements
};

/// global_ranges win over the placements; global_offset must agree with them, and wins where they leave the slices
/// open. Errors: Error(bad_input) that shows both, for a shape or an offset that contradicts the placements.
/// @pre manifest.holds(parameter, rank)
[[nodiscard]] RecordedLayout recorded_layout(const Manifest& manifest, const ParameterEntry& parameter,
                                             std::int32_t rank, const RecordedSlice& slice, const std::string& where);

}  // namespace gradclip
