#pragma once
// Ascending ranges of indices in which many equal pieces, as a _StridedShard makes them, take the memory of one.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <vector>

namespace gradclip {

/// Indices [begin, end).
struct IndexRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t size() const noexcept { return end - begin; }
  friend bool operator==(const IndexRange&, const IndexRange&) = default;
};

/// What a list is kept as: count ranges of one size whose begins are stride apart.
struct RangeProgression {
  IndexRange first;
  std::int64_t stride = 0;  ///< more than the size; 0 where count is 1
  std::int64_t count = 1;
  std::int64_t before = 0;  ///< indices in the list before the first

  [[nodiscard]] IndexRange range(std::int64_t i) const noexcept {
    return {first.begin + i * stride, first.end + i * stride};
  }
  [[nodiscard]] std::int64_t length() const noexcept { return first.size() * count; }
  friend bool operator==(const RangeProgression&, const RangeProgression&) = default;
};

/// Ranges without overlap, ascending. Looking something up takes logarithmic time in the number of progressions.
class RangeList {
 public:
  /// Ranges one after another.
  class const_iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = IndexRange;
    using difference_type = std::ptrdiff_t;
    using pointer = const IndexRange*;
    using reference = IndexRange;

    const_iterator() = default;
    IndexRange operator*() const noexcept { return progression_->range(i_); }
    const_iterator& operator++() noexcept {
      if (++i_ == progression_->count) {
        ++progression_;
        i_ = 0;
      }
      return *this;
    }
    const_iterator operator++(int) noexcept {
      const const_iterator before = *this;
      ++*this;
      return before;
    }
    friend bool operator==(const const_iterator&, const const_iterator&) = default;

   private:
    friend class RangeList;
    explicit const_iterator(const RangeProgression* progression) : progression_(progression) {}

    const RangeProgression* progression_ = nullptr;
    std::int64_t i_ = 0;
  };
  using iterator = const_iterator;
  using value_type = IndexRange;

  /// A range, and how many indices the ranges before it hold.
  struct Place {
    IndexRange range;
    std::int64_t before = 0;
  };

  RangeList() = default;
  /// As they are, empty or touching ones too.
  RangeList(std::initializer_list<IndexRange> ranges);
  RangeList(const std::vector<IndexRange>& ranges);

  /// @pre 0 <= the last range's end <= range.begin <= range.end
  void push_back(IndexRange range);
  /// Nothing for an empty range; one that touches the last becomes a part of it. @pre as push_back
  void append(IndexRange range);
  /// The ranges first + i * stride for i in [0, count), each as above. @pre stride >= first.size()
  void append(IndexRange first, std::int64_t stride, std::int64_t count);

  [[nodiscard]] bool empty() const noexcept { return progressions_.empty(); }
  /// Number of ranges.
  [[nodiscard]] std::size_t size() const noexcept;
  /// Number of indices.
  [[nodiscard]] std::int64_t length() const noexcept;
  /// @pre not empty; in time proportional to the number of progressions
  [[nodiscard]] IndexRange operator[](std::size_t i) const noexcept;
  [[nodiscard]] IndexRange front() const noexcept { return progressions_.front().first; }
  [[nodiscard]] IndexRange back() const noexcept { return progressions_.back().range(progressions_.back().count - 1); }
  [[nodiscard]] const_iterator begin() const noexcept { return const_iterator(progressions_.data()); }
  [[nodiscard]] const_iterator end() const noexcept {
    return const_iterator(progressions_.data() + progressions_.size());
  }
  [[nodiscard]] std::span<const RangeProgression> progressions() const noexcept { return progressions_; }

  /// The range in which the index number `position` lies. @pre 0 <= position < length()
  [[nodiscard]] Place at(std::int64_t position) const noexcept;
  /// How many of its indices are less than `index`.
  [[nodiscard]] std::int64_t count_below(std::int64_t index) const noexcept;
  [[nodiscard]] bool holds(std::int64_t index) const noexcept;

  friend bool operator==(const RangeList&, const RangeList&) = default;

 private:
  void pop_back();

  std::vector<RangeProgression> progressions_;  // each as long as it can be, so that equal lists look alike
};

}  // namespace gradclip
