#include "gradclip/mesh/coverage.hpp"

#include <algorithm>
#include <bit>
#include <vector>

namespace gradclip {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr std::uint64_t kPrime = (std::uint64_t{1} << 61) - 1;

std::uint64_t sum(std::uint64_t a, std::uint64_t b) noexcept {
  const std::uint64_t s = a + b;
  return s >= kPrime ? s - kPrime : s;
}

std::uint64_t difference(std::uint64_t a, std::uint64_t b) noexcept {
  return sum(a, kPrime - b);
}

std::uint64_t product(std::uint64_t a, std::uint64_t b) noexcept {
  const Wide wide = static_cast<Wide>(a) * b;
  return sum(static_cast<std::uint64_t>(wide & kPrime), static_cast<std::uint64_t>(wide >> 61));
}

std::uint64_t power(std::uint64_t base, std::int64_t exponent) noexcept {
  std::uint64_t result = 1;
  for (auto rest = static_cast<std::uint64_t>(exponent); rest != 0; rest >>= 1) {
    if ((rest & 1) != 0) result = product(result, base);
    base = product(base, base);
  }
  return result;
}

/// 1 + base + ... + base^(count - 1), without a division, which base = 1 would not allow.
std::uint64_t geometric_sum(std::uint64_t base, std::int64_t count) noexcept {
  std::uint64_t result = 0, next = 1;  // of the leading bits of count, and base to their power
  for (std::uint64_t bit = std::bit_floor(static_cast<std::uint64_t>(count)); bit != 0; bit >>= 1) {
    result = sum(result, product(result, next));
    next = product(next, next);
    if ((static_cast<std::uint64_t>(count) & bit) == 0) continue;
    result = sum(result, next);
    next = product(next, base);
  }
  return result;
}

/// The point of a tensor dimension: numbers that have nothing to do with each other (the steps of SplitMix64).
std::uint64_t point_of(std::size_t dimension) noexcept {
  std::uint64_t z = 0x9e3779b97f4a7c15 * (static_cast<std::uint64_t>(dimension) + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return (z ^ (z >> 31)) % (kPrime - 2) + 2;
}

/// One dimension of a shard. All sums are (x - 1) times what they are, in every dimension of every shard alike, which
/// saves the division of the geometric series.
class Side {
 public:
  Side(std::uint64_t point, const RangeList& ranges) : point_(point), ranges_(ranges) {}

  [[nodiscard]] std::int64_t length() const noexcept { return ranges_.length(); }
  /// Of the first `count` indices.
  [[nodiscard]] std::uint64_t first(std::int64_t count) const noexcept {
    std::uint64_t result = 0;
    for (const RangeProgression& each : ranges_.progressions()) {
      if (each.before >= count) break;
      if (each.first.size() == 0) continue;
      const std::int64_t held = std::min(each.length(), count - each.before);
      const std::int64_t whole = held / each.first.size(), rest = held % each.first.size();
      const std::uint64_t begins =
          product(power(point_, each.first.begin), geometric_sum(power(point_, each.stride), whole));
      result = sum(result, product(of_first(each.first.size()), begins));
      if (rest > 0) result = sum(result, product(of_first(rest), power(point_, each.range(whole).begin)));
    }
    return result;
  }
  [[nodiscard]] std::uint64_t only(std::int64_t position) const noexcept {
    return difference(first(position + 1), first(position));
  }

 private:
  /// Of indices [0, size).
  [[nodiscard]] std::uint64_t of_first(std::int64_t size) const noexcept { return difference(power(point_, size), 1); }

  std::uint64_t point_;
  const RangeList& ranges_;
};

/// Of the first `count` elements of a block in row-major order: in each dimension what lies before the last element's
/// index there, with its own index in the dimensions before and all of those after.
std::uint64_t first_elements(std::span<const Side> sides, std::int64_t count) {
  std::vector<std::int64_t> strides(sides.size() + 1, 1);
  std::vector<std::uint64_t> after(sides.size() + 1, 1);
  for (std::size_t d = sides.size(); d-- > 0;) {
    strides[d] = strides[d + 1] * sides[d].length();
    after[d] = product(after[d + 1], sides[d].first(sides[d].length()));
  }
  if (strides[0] == 0) return 0;
  if (count >= strides[0]) return after[0];
  std::uint64_t result = 0, here = 1;
  for (std::size_t d = 0; d < sides.size(); ++d) {
    const std::int64_t index = count / strides[d + 1];
    count %= strides[d + 1];
    result = sum(result, product(here, product(sides[d].first(index), after[d + 1])));
    here = product(here, sides[d].only(index));
  }
  return result;
}

}  // namespace

Coverage::Coverage(const ShardLayout& layout) {
  if (layout.elements() == 0) return;
  std::vector<Side> sides;
  for (const RangeList& ranges : layout.ranges()) sides.emplace_back(point_of(sides.size()), ranges);
  if (const std::optional<IndexRange>& flat = layout.flat()) {
    value_ = difference(first_elements(sides, flat->end), first_elements(sides, flat->begin));
    return;
  }
  value_ = 1;
  for (const Side& side : sides) value_ = product(value_, side.first(side.length()));
}

Coverage& Coverage::operator+=(Coverage other) noexcept {
  value_ = sum(value_, other.value_);
  return *this;
}

Coverage& Coverage::operator-=(Coverage other) noexcept {
  value_ = difference(value_, other.value_);
  return *this;
}

Coverage Coverage::times(std::uint64_t times) const noexcept {
  Coverage result;
  result.value_ = product(value_, times % kPrime);
  return result;
}

}  // namespace gradclip
