#include "gradclip/analysis/difference.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gradclip/analysis/difference_kernels.hpp"
#include "gradclip/base/element.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using difference::kTileElements;
using difference::kTileLanes;
using difference::TileRatios;
using difference::TileRule;
using difference::TileSums;

std::size_t padded(std::size_t count) {
  return (count + kTileLanes - 1) / kTileLanes * kTileLanes;
}

/// Widens whole vectors; the last elements, which may end where memory ends, through a copy.
template <class T>
void widen_all(void (*widen)(const T*, double*, std::size_t), const std::byte* from, std::size_t count, double* to) {
  constexpr std::size_t kStep = 8;
  const std::size_t whole = count / kStep * kStep;
  widen(reinterpret_cast<const T*>(from), to, whole);
  if (whole == count) return;
  T last[kStep] = {};
  double wide[kStep];
  std::memcpy(last, from + whole * sizeof(T), (count - whole) * sizeof(T));
  widen(last, wide, kStep);
  std::copy(wide, wide + (count - whole), to + whole);
}

/// One tile of both sides in float64, filled up with zeros.
struct Tile {
  alignas(64) double a[kTileElements];
  alignas(64) double b[kTileElements];
};

class TileComparison {
 public:
  TileComparison(const ElementView& a, const ElementView& b, const ElementRule& rule, std::size_t most,
                 std::vector<WorstElement>& worst)
      : a_(a),
        b_(b),
        rule_(rule),
        tile_rule_{rule.relative, rule.absolute, a.smallest_normal, b.smallest_normal},
        most_(most),
        worst_(worst),
        scaled_(a.dtype == DType::float64 || b.dtype == DType::float64) {}

  /// Elements [first, first + count) of the views.
  Difference compare(std::size_t first, std::size_t count, std::uint64_t position) {
    Difference found;
    found.elements = count;
    const std::size_t a_size = size_of(a_.dtype), b_size = size_of(b_.dtype);
    const std::byte* a_data = a_.data + first * a_size;
    const std::byte* b_data = b_.data + first * b_size;
    const bool any_none = a_.none != nullptr || b_.none != nullptr;
    const bool same = !any_none && a_.dtype == b_.dtype && std::memcmp(a_data, b_data, count * a_size) == 0;
    widen_elements(a_data, a_.dtype, count, tile_.a);
    std::fill(tile_.a + count, tile_.a + padded(count), 0.0);
    const double* b = tile_.a;
    if (!same) {
      widen_elements(b_data, b_.dtype, count, tile_.b);
      std::fill(tile_.b + count, tile_.b + padded(count), 0.0);
      b = tile_.b;
    }
    if (any_none) take_none_away(found, first, count, position);
    TileSums sums;
    measure(b, count, found.sums.exponent, sums);
    if (!std::isfinite(sums.xx) || !std::isfinite(sums.yy)) {
      if (b == tile_.a) {
        std::copy(tile_.a, tile_.a + padded(count), tile_.b);
        b = tile_.b;
      }
      take_nonfinite_away(found, count, position);
      measure(b, count, found.sums.exponent, sums);
    }
    found.sums.aa = sums.xx;
    found.sums.bb = sums.yy;
    found.sums.ab = sums.xy;
    found.sums.dd = sums.dd;
    if (sums.largest == 0.0) {
      if (sums.xx > 0.0) {
        found.ratio_low = std::min(found.ratio_low, 1.0);
        found.ratio_high = std::max(found.ratio_high, 1.0);
      }
      return found;
    }
    measure_differences(found, count, position, sums.largest);
    return found;
  }

 private:
  void measure(const double* b, std::size_t count, std::int32_t& exponent, TileSums& sums) const {
    const auto& kernels = difference::kernels();
    exponent = 0;
    if (scaled_) {
      exponent = exponent_of(std::max(kernels.largest(tile_.a, padded(count)), kernels.largest(b, padded(count))));
    }
    if (b != tile_.a) {
      kernels.sums(tile_.a, b, padded(count), power_of_two(-exponent), sums);
    } else {
      sums = {};
      sums.xx = sums.yy = sums.xy = kernels.squares(tile_.a, padded(count), power_of_two(-exponent));
    }
  }

  static void note(Difference& found, std::uint64_t position) {
    ++found.different;
    found.first_different = std::min(found.first_different, position);
  }

  void take_none_away(Difference& found, std::size_t first, std::size_t count, std::uint64_t position) {
    for (std::size_t i = 0; i < count; ++i) {
      const bool a_none = a_.none != nullptr && a_.none[first + i] != 0;
      const bool b_none = b_.none != nullptr && b_.none[first + i] != 0;
      if (!a_none && !b_none) continue;
      if (a_none && b_none) {
        ++found.none;
      } else {
        ++found.none_different;
        ++found.ratio_broken;
        note(found, position + i);
      }
      tile_.a[i] = tile_.b[i] = 0.0;
    }
  }

  /// Pairs with a NaN or an infinity are judged here and are zeros afterwards.
  void take_nonfinite_away(Difference& found, std::size_t count, std::uint64_t position) {
    for (std::size_t i = 0; i < count; ++i) {
      const double a = tile_.a[i], b = tile_.b[i];
      if (std::isfinite(a) && std::isfinite(b)) continue;
      tile_.a[i] = tile_.b[i] = 0.0;
      if (rule_.equal(a, b)) continue;
      note(found, position + i);
      ++found.ratio_broken;
      keep(position + i, a, b);
      if (std::isnan(a) || std::isnan(b)) {
        ++found.nan_different;
        found.first_nan = std::min(found.first_nan, position + i);
      } else {
        raise(found.max_abs, found.max_abs_at, std::numeric_limits<double>::infinity(), position + i);
        raise(found.max_rel, found.max_rel_at, std::isinf(b) ? 1.0 : std::numeric_limits<double>::infinity(),
              position + i);
      }
    }
  }

  static void raise(double& most, std::uint64_t& at, double value, std::uint64_t position) {
    if (value > most || (value == most && position < at)) {
      most = value;
      at = position;
    }
  }

  void measure_differences(Difference& found, std::size_t count, std::uint64_t position, double largest) {
    const double most_relative = ratios_.largest_relative;
    difference::kernels().ratios(tile_.a, tile_.b, padded(count), tile_rule_, ratios_);
    found.ratio_low = std::min(found.ratio_low, ratios_.low);
    found.ratio_high = std::max(found.ratio_high, ratios_.high);
    found.ratio_unknown += ratios_.unknown;
    found.ratio_broken += ratios_.broken;
    // What an earlier tile has already need not be found again.
    if (largest > most_apart_) {
      most_apart_ = largest;
      place(found.max_abs, found.max_abs_at, largest, count, position,
            [&](std::size_t i) { return std::abs(tile_.a[i] - tile_.b[i]); });
    }
    if (ratios_.largest_relative > most_relative) {
      place(found.max_rel, found.max_rel_at, ratios_.largest_relative, count, position, [&](std::size_t i) {
        const double apart = std::abs(tile_.a[i] - tile_.b[i]);
        return apart > 0.0 ? apart / std::abs(tile_.b[i]) : 0.0;
      });
    }
    if (!rule_.ulps && ratios_.different == 0) return;
    const bool list_all = rule_.ulps.has_value() || most_ > 0;
    if (!list_all) found.different += ratios_.different;
    for (std::size_t i = 0; i < count; ++i) {
      const double a = tile_.a[i], b = tile_.b[i];
      if (a == b || rule_.equal(a, b)) continue;
      if (!list_all) {
        found.first_different = std::min(found.first_different, position + i);
        return;
      }
      note(found, position + i);
      keep(position + i, a, b);
    }
  }

  template <class Value>
  static void place(double& most, std::uint64_t& at, double largest, std::size_t count, std::uint64_t position,
                    const Value& value) {
    if (largest < most) return;
    for (std::size_t i = 0; i < count; ++i) {
      if (value(i) != largest) continue;
      raise(most, at, largest, position + i);
      return;
    }
  }

  void keep(std::uint64_t position, double a, double b) {
    if (most_ > 0) keep_worst(worst_, {position, a, b}, most_);
  }

  const ElementView& a_;
  const ElementView& b_;
  const ElementRule& rule_;
  TileRule tile_rule_;
  std::size_t most_;
  std::vector<WorstElement>& worst_;
  bool scaled_;
  double most_apart_ = 0.0;  // of the tiles so far; so are the extremes of
  TileRatios ratios_;
  Tile tile_;
};

/// x · 2^-2k for what a sum of squares gives up when its exponent grows by k.
double lowered(double sum, std::int64_t by) {
  return std::ldexp(sum, static_cast<int>(std::max<std::int64_t>(-2 * by, -4000)));
}

}  // namespace

PairSums add(const PairSums& a, const PairSums& b) noexcept {
  const auto is_empty = [](const PairSums& sums) { return sums.aa == 0.0 && sums.bb == 0.0; };
  if (is_empty(b)) return a;
  if (is_empty(a)) return b;
  PairSums sum;
  sum.exponent = std::max(a.exponent, b.exponent);
  const std::int64_t a_by = sum.exponent - a.exponent, b_by = sum.exponent - b.exponent;
  sum.aa = lowered(a.aa, a_by) + lowered(b.aa, b_by);
  sum.bb = lowered(a.bb, a_by) + lowered(b.bb, b_by);
  sum.ab = lowered(a.ab, a_by) + lowered(b.ab, b_by);
  sum.dd = lowered(a.dd, a_by) + lowered(b.dd, b_by);
  return sum;
}

void append(Difference& to, const Difference& next) noexcept {
  to.elements += next.elements;
  to.different += next.different;
  to.nan_different += next.nan_different;
  to.none_different += next.none_different;
  to.none += next.none;
  to.first_different = std::min(to.first_different, next.first_different);
  to.first_nan = std::min(to.first_nan, next.first_nan);
  if (next.max_abs > to.max_abs) {
    to.max_abs = next.max_abs;
    to.max_abs_at = next.max_abs_at;
  }
  if (next.max_rel > to.max_rel) {
    to.max_rel = next.max_rel;
    to.max_rel_at = next.max_rel_at;
  }
  to.sums = add(to.sums, next.sums);
  to.ratio_low = std::min(to.ratio_low, next.ratio_low);
  to.ratio_high = std::max(to.ratio_high, next.ratio_high);
  to.ratio_unknown += next.ratio_unknown;
  to.ratio_broken += next.ratio_broken;
}

bool is_worse(const WorstElement& x, const WorstElement& y) noexcept {
  const double x_apart = std::abs(x.a - x.b), y_apart = std::abs(y.a - y.b);
  // inf - inf of one sign never gets here: it is equal.
  if (std::isnan(x_apart) != std::isnan(y_apart)) return std::isnan(x_apart);
  if (!std::isnan(x_apart) && x_apart != y_apart) return x_apart > y_apart;
  return x.position < y.position;
}

void keep_worst(std::vector<WorstElement>& worst, const WorstElement& element, std::size_t most) {
  if (worst.size() == most) {
    if (!is_worse(element, worst.front())) return;
    std::pop_heap(worst.begin(), worst.end(), is_worse);
    worst.pop_back();
  }
  worst.push_back(element);
  std::push_heap(worst.begin(), worst.end(), is_worse);
}

void sort_worst(std::vector<WorstElement>& worst, std::size_t most) {
  std::sort(worst.begin(), worst.end(), is_worse);
  if (worst.size() > most) worst.resize(most);
}

void widen_elements(const std::byte* from, DType dtype, std::size_t count, double* to) {
  const difference::Kernels& kernels = difference::kernels();
  switch (dtype) {
    case DType::float64:
      std::memcpy(to, from, count * sizeof(double));
      return;
    case DType::float32:
      return widen_all(kernels.widen_float32, from, count, to);
    case DType::bfloat16:
      return widen_all(kernels.widen_bfloat16, from, count, to);
    case DType::float16:
      return widen_all(kernels.widen_float16, from, count, to);
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
      break;
  }
  throw Error(ExitCode::bug, {.where = "widen_elements", .found = "a float8 type"});
}

Difference compare_elements(const ElementView& a, const ElementView& b, std::size_t count, std::uint64_t position,
                            const ElementRule& rule, std::size_t most, std::vector<WorstElement>& worst) {
  TileComparison comparison(a, b, rule, most, worst);
  Difference result;
  for (std::size_t first = 0; first < count; first += kTileElements) {
    append(result, comparison.compare(first, std::min(kTileElements, count - first), position + first));
  }
  return result;
}

}  // namespace gradclip
