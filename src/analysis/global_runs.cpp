#include "gradclip/analysis/global_runs.hpp"

#include <algorithm>

namespace gradclip {
namespace {

std::uint64_t length(const RangeList& ranges) {
  return static_cast<std::uint64_t>(ranges.length());
}

bool is_whole(const RangeList& ranges, std::int64_t extent) {
  return ranges.size() == 1 && ranges.front() == IndexRange{0, extent};
}

/// Appends a run, as one more repeat of the last one where it continues its pattern.
void append(std::vector<StridedRun>& runs, std::uint32_t offset, std::uint32_t count) {
  if (!runs.empty()) {
    StridedRun& last = runs.back();
    if (last.repeats == 1 && last.offset + last.count == offset) {
      last.count += count;
      return;
    }
    const std::uint32_t stride = last.repeats == 1 ? offset - last.offset : last.stride;
    if (last.count == count && last.offset + last.repeats * stride == offset) {
      last.stride = stride;
      ++last.repeats;
      return;
    }
  }
  runs.push_back({offset, count, 0, 1});
}

}  // namespace

std::uint64_t elements_before(const ShardLayout& layout, std::span<const std::int64_t> shape, std::uint64_t position) {
  const std::size_t dimensions = shape.size();
  std::vector<std::uint64_t> global_volume(dimensions + 1, 1), local_volume(dimensions + 1, 1);
  for (std::size_t d = dimensions; d-- > 0;) {
    global_volume[d] = global_volume[d + 1] * static_cast<std::uint64_t>(shape[d]);
    local_volume[d] = local_volume[d + 1] * length(layout.ranges()[d]);
  }
  std::uint64_t before = 0;
  if (local_volume[0] == 0 || position >= global_volume[0]) {
    before = position == 0 ? 0 : local_volume[0];
  } else {
    for (std::size_t d = 0; d < dimensions; ++d) {
      const auto index = static_cast<std::int64_t>(position / global_volume[d + 1]);
      position %= global_volume[d + 1];
      before += static_cast<std::uint64_t>(layout.ranges()[d].count_below(index)) * local_volume[d + 1];
      if (!layout.ranges()[d].holds(index)) break;
    }
  }
  if (!layout.flat()) return before;
  const auto flat_begin = static_cast<std::uint64_t>(layout.flat()->begin);
  return before <= flat_begin ? 0 : std::min(before - flat_begin, static_cast<std::uint64_t>(layout.flat()->size()));
}

GlobalExtent global_extent(const ShardLayout& layout, std::span<const std::int64_t> shape) {
  if (layout.elements() == 0) return {};
  std::uint64_t first = 0, last = 0;
  bool whole = true;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const RangeList& ranges = layout.ranges()[d];
    const auto extent = static_cast<std::uint64_t>(shape[d]);
    first = first * extent + static_cast<std::uint64_t>(ranges.front().begin);
    last = last * extent + static_cast<std::uint64_t>(ranges.back().end - 1);
    whole = whole && is_whole(ranges, shape[d]);
  }
  if (whole && layout.flat()) {
    return {static_cast<std::uint64_t>(layout.flat()->begin), static_cast<std::uint64_t>(layout.flat()->end)};
  }
  return {first, last + 1};
}

std::vector<StridedRun> global_runs(const ShardLayout& layout, std::span<const std::int64_t> shape, std::uint64_t first,
                                    std::uint64_t last, std::uint64_t begin) {
  std::vector<StridedRun> runs;
  if (first >= last) return runs;
  if (layout.flat()) {
    first += static_cast<std::uint64_t>(layout.flat()->begin);
    last += static_cast<std::uint64_t>(layout.flat()->begin);
  }
  // The dimensions after `split` are held whole: one index of `split` is one piece of `inner` elements.
  std::size_t split = shape.size();
  std::uint64_t inner = 1;
  while (split > 0 && is_whole(layout.ranges()[split - 1], shape[split - 1])) {
    --split;
    inner *= static_cast<std::uint64_t>(shape[split]);
  }
  if (split == 0) {
    append(runs, static_cast<std::uint32_t>(first - begin), static_cast<std::uint32_t>(last - first));
    return runs;
  }
  --split;
  const RangeList& columns = layout.ranges()[split];
  const std::uint64_t row = length(columns);
  for (std::uint64_t at = first; at < last;) {
    const std::uint64_t inside = at % inner;
    std::uint64_t outer = at / inner / row;
    std::uint64_t global = 0;  // of the outer dimensions' indices
    std::uint64_t volume = 1;
    for (std::size_t d = split; d-- > 0;) {
      const std::uint64_t extent = length(layout.ranges()[d]);
      const auto place = static_cast<std::int64_t>(outer % extent);
      outer /= extent;
      const auto [range, before] = layout.ranges()[d].at(place);
      global += static_cast<std::uint64_t>(range.begin + (place - before)) * volume;
      volume *= static_cast<std::uint64_t>(shape[d]);
    }
    const auto column = static_cast<std::int64_t>(at / inner % row);
    const auto [range, before] = columns.at(column);
    const std::int64_t index = range.begin + (column - before);
    const std::uint64_t count = std::min(static_cast<std::uint64_t>(range.end - index) * inner - inside, last - at);
    const std::uint64_t position =
        (global * static_cast<std::uint64_t>(shape[split]) + static_cast<std::uint64_t>(index)) * inner + inside;
    append(runs, static_cast<std::uint32_t>(position - begin), static_cast<std::uint32_t>(count));
    at += count;
  }
  return runs;
}

}  // namespace gradclip
