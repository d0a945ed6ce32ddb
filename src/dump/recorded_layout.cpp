#include "gradclip/dump/recorded_layout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

std::string list(const std::vector<std::int64_t>& numbers) {
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

std::string from_what(const Manifest& manifest, const ParameterEntry& parameter, std::int32_t rank) {
  if (!parameter.mesh) return "the whole tensor " + list(parameter.shape) + ", which is on no mesh";
  const DeviceMesh& mesh = manifest.meshes[*parameter.mesh];
  return fmt::format("{} as {} on mesh {} at coordinate {}", list(parameter.shape), to_string(parameter.layout()),
                     quoted(mesh.name()), list(mesh.coordinate(rank)));
}

void check_shape(const std::vector<std::int64_t>& found, const ShardLayout& layout, const std::string& source,
                 const std::string& where) {
  if (found == layout.local_shape()) return;
  throw Error(ExitCode::bad_input, {.where = where,
                                    .found = "has the shape " + list(found),
                                    .expected = list(layout.local_shape()) + " (" + source + ")",
                                    .advice = {},
                                    .kind = "shape"});
}

}  // namespace

RecordedLayout recorded_layout(const Manifest& manifest, const ParameterEntry& parameter, std::int32_t rank,
                               const RecordedSlice& slice, const std::string& where) {
  if (slice.global_ranges) {
    ShardLayout layout = layout_from_ranges(parameter.shape, *slice.global_ranges, where);
    check_shape(slice.shape, layout, "its global_ranges", where);
    return {std::move(layout), true};
  }
  if (slice.global_offset && parameter.mesh && slice.shape.size() == parameter.shape.size() &&
      slices_are_ambiguous(parameter.shape, manifest.meshes[*parameter.mesh], parameter.layout())) {
    return {layout_from_offset(parameter.shape, *slice.global_offset, slice.shape, where), true};
  }
  ShardLayout layout = manifest.layout(parameter, rank);
  // An empty shard is empty in whichever dimension its framework ran out of elements first: FSDP2 does not cut what
  // tensor parallelism has left empty.
  if (layout.elements() == 0 && slice.shape.size() == layout.local_shape().size() &&
      std::find(slice.shape.begin(), slice.shape.end(), 0) != slice.shape.end()) {
    return {std::move(layout)};
  }
  if (slice.shape != layout.local_shape())
    check_shape(slice.shape, layout, from_what(manifest, parameter, rank), where);
  if (!slice.global_offset || layout.elements() == 0) return {std::move(layout)};
  std::string expected = "no global_offset but global_ranges, as it is not one block";
  if (layout.flat()) {
    if (*slice.global_offset == std::vector<std::int64_t>{layout.flat()->begin}) return {std::move(layout)};
    expected = list({layout.flat()->begin});
  } else if (layout.is_block()) {
    if (*slice.global_offset == layout.offset()) return {std::move(layout)};
    expected = list(layout.offset());
  }
  throw Error(ExitCode::bad_input, {.where = where,
                                    .found = "its global_offset is " + list(*slice.global_offset),
                                    .expected = expected + " (" + from_what(manifest, parameter, rank) + ")",
                                    .advice = {},
                                    .kind = "placement"});
}

}  // namespace gradclip
