#include "gradclip/mesh/range_list.hpp"

#include <algorithm>

#include "gradclip/base/error.hpp"

namespace gradclip {

RangeList::RangeList(std::initializer_list<IndexRange> ranges) {
  for (const IndexRange& range : ranges) push_back(range);
}

RangeList::RangeList(const std::vector<IndexRange>& ranges) {
  for (const IndexRange& range : ranges) push_back(range);
}

void RangeList::push_back(IndexRange range) {
  const std::int64_t end = empty() ? 0 : back().end;
  GRADCLIP_CHECK(end <= range.begin && range.begin <= range.end, "ranges that are not ascending");
  if (empty()) {
    progressions_.push_back({range, 0, 1, 0});
    return;
  }
  RangeProgression& last = progressions_.back();
  const std::int64_t stride = range.begin - last.range(last.count - 1).begin;
  // What touches is no progression: its ranges would be one.
  const bool alike = range.size() > 0 && range.size() == last.first.size() && range.begin > end;
  if (alike && (last.count == 1 || stride == last.stride)) {
    last.stride = stride;
    ++last.count;
    return;
  }
  progressions_.push_back({range, 0, 1, last.before + last.length()});
}

void RangeList::pop_back() {
  RangeProgression& last = progressions_.back();
  if (last.count == 1) {
    progressions_.pop_back();
  } else if (--last.count == 1) {
    last.stride = 0;
  }
}

void RangeList::append(IndexRange range) {
  if (range.size() == 0) return;
  if (!empty() && back().end == range.begin) {
    range.begin = back().begin;
    pop_back();
  }
  push_back(range);
}

void RangeList::append(IndexRange first, std::int64_t stride, std::int64_t count) {
  if (first.size() == 0 || count == 0) return;
  if (stride == first.size()) {
    append({first.begin, first.begin + stride * count});
    return;
  }
  std::int64_t appended = 0;
  for (; appended < count; ++appended) {
    if (appended > 0 && progressions_.back().count > 1 && progressions_.back().stride == stride &&
        progressions_.back().first.size() == first.size()) {
      break;
    }
    append({first.begin + appended * stride, first.end + appended * stride});
  }
  progressions_.back().count += count - appended;
}

std::size_t RangeList::size() const noexcept {
  std::size_t size = 0;
  for (const RangeProgression& progression : progressions_) size += static_cast<std::size_t>(progression.count);
  return size;
}

std::int64_t RangeList::length() const noexcept {
  return empty() ? 0 : progressions_.back().before + progressions_.back().length();
}

IndexRange RangeList::operator[](std::size_t i) const noexcept {
  auto rest = static_cast<std::int64_t>(i);
  auto progression = progressions_.begin();
  while (rest >= progression->count) rest -= (progression++)->count;
  return progression->range(rest);
}

RangeList::Place RangeList::at(std::int64_t position) const noexcept {
  // The last that begins there or before; an empty one after it begins at the same position, and holds nothing.
  auto after = std::upper_bound(progressions_.begin(), progressions_.end(), position,
                                [](std::int64_t at, const RangeProgression& each) { return at < each.before; });
  while ((--after)->first.size() == 0) {
  }
  const std::int64_t i = (position - after->before) / after->first.size();
  return {after->range(i), after->before + i * after->first.size()};
}

std::int64_t RangeList::count_below(std::int64_t index) const noexcept {
  const auto after =
      std::lower_bound(progressions_.begin(), progressions_.end(), index,
                       [](const RangeProgression& each, std::int64_t at) { return each.first.begin < at; });
  if (after == progressions_.begin()) return 0;
  const RangeProgression& last = *(after - 1);
  const std::int64_t i = last.count == 1 ? 0 : std::min((index - 1 - last.first.begin) / last.stride, last.count - 1);
  return last.before + i * last.first.size() + std::min(last.first.size(), index - last.range(i).begin);
}

bool RangeList::holds(std::int64_t index) const noexcept {
  const std::int64_t position = count_below(index);
  if (position == length()) return false;
  return at(position).range.begin <= index;
}

}  // namespace gradclip
