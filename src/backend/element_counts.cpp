// Narrow types are counted by their bit patterns, of which there are few: what scaling makes of a pattern is found
// once, at the end. The others by the exponent's bits of every scaled element, and by limits between which casts do the
// same.

#include "gradclip/backend/element_counts.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "gradclip/backend/cpu/kernels.hpp"
#include "gradclip/base/dispatch.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

constexpr int kLeastExponent = -1074;  // of float64
constexpr int kMostExponent = 1023;

/// Counters of 32 bits hold what was added since they were last emptied.
constexpr std::uint64_t kMostBetweenFolds = std::uint64_t{1} << 30;

/// Up to here the patterns of a 16-bit type are counted one by one: emptying a table of them takes as long.
constexpr std::size_t kFewElements = 4096;

constexpr std::size_t kCasts = kCastTypes.size();

// ---------------------------------------------------------------------------------------------------------------------
// Limits between which all magnitudes of a type become the same kind of number
// ---------------------------------------------------------------------------------------------------------------------

/// By magnitude bits: below `nonzero` a cast gives 0, below `normal` a subnormal, from `nonfinite` on no number.
template <DType From>
struct CastLimits {
  BitsOf<From> nonzero;
  BitsOf<From> normal;
  BitsOf<From> nonfinite;
};

/// The smallest finite magnitude of which `is` holds; kNonfinite if there is none. @pre once true, it stays true
template <DType From, class Is>
BitsOf<From> smallest_magnitude(const Is& is) {
  BitsOf<From> low = 0;
  BitsOf<From> high = Element<From>::kNonfinite;
  while (low < high) {
    const BitsOf<From> middle = low + (high - low) / 2;
    if (is(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

template <DType From>
const std::array<CastLimits<From>, kCasts>& cast_limits() {
  static const std::array<CastLimits<From>, kCasts> limits = [] {
    std::array<CastLimits<From>, kCasts> found{};
    for (std::size_t i = 0; i < kCasts; ++i) {
      with_dtype(kCastTypes[i], [&]<DType To>() {
        const auto from = [](BitsOf<To> magnitude) {
          return smallest_magnitude<From>([magnitude](BitsOf<From> bits) {
            return magnitude_bits<To>(convert_element<To, From>(bits, 1.0F)) >= magnitude;
          });
        };
        found[i] = {from(1), from(Element<To>::kSmallestNormal), from(Element<To>::kNonfinite)};
      });
    }
    return found;
  }();
  return limits;
}

// ---------------------------------------------------------------------------------------------------------------------
// One number, many times
// ---------------------------------------------------------------------------------------------------------------------

/// Of a finite number other than 0: its e with 2^e <= |x| < 2^(e + 1).
template <DType D>
int exponent_of_magnitude(BitsOf<D> magnitude) {
  constexpr int kMantissaBits = std::countr_zero(Element<D>::kSmallestNormal);
  constexpr int kBias = D == DType::float64 ? 1023 : 127;
  if (magnitude < Element<D>::kSmallestNormal) return std::bit_width(magnitude) - kBias - kMantissaBits;
  return static_cast<int>(magnitude >> kMantissaBits) - kBias;
}

/// @param x  one of Compute's numbers
template <DType D>
void add_number(ExponentHistogram& histogram, ComputeOf<D> x, std::uint64_t count) {
  constexpr DType kWide = std::is_same_v<ComputeOf<D>, double> ? DType::float64 : DType::float32;
  const BitsOf<kWide> bits = bits_as<BitsOf<kWide>>(x);
  const BitsOf<kWide> magnitude = magnitude_bits<kWide>(bits);
  if (magnitude == 0) {
    histogram.zeros += count;
  } else if (magnitude >= Element<kWide>::kNan) {
    histogram.nan += count;
  } else if (magnitude >= Element<kWide>::kNonfinite) {
    (bits == magnitude ? histogram.posinf : histogram.neginf) += count;
  } else {
    histogram.add(exponent_of_magnitude<kWide>(magnitude), count);
    const auto& limits = cast_limits<kWide>();
    for (std::size_t i = 0; i < kCasts; ++i) {
      CastCounts& cast = histogram.casts[i];
      if (magnitude < limits[i].nonzero) {
        cast.to_zero += count;
      } else if (magnitude < limits[i].normal) {
        cast.to_subnormal += count;
      } else if (magnitude >= limits[i].nonfinite) {
        cast.overflow += count;
      }
    }
  }
}

template <DType D>
void add_stored(ExponentHistogram& histogram, BitsOf<D> stored, const ScaleFactors& factors, std::uint64_t count) {
  add_number<D>(histogram, element_value<D>(scale_element<D>(stored, factors), factors.scale_inv), count);
}

// ---------------------------------------------------------------------------------------------------------------------
// Inner loops. As everywhere, what uses newer instructions carries an attribute and stands in an unnamed namespace
// (backend/cpu/vector_loops.inl says why).
// ---------------------------------------------------------------------------------------------------------------------

/// Zeros, three limits of each cast, infinity: in two halves, of which each fits the registers with its counters.
constexpr std::size_t kHalf = (3 * kCasts + 2) / 2;
constexpr std::size_t kLimits = 2 * kHalf;

/// below[k] += how many magnitudes are below limits[k]. `Signed`, because the oldest processors compare nothing else;
/// magnitudes are not negative.
template <class Signed>
inline __attribute__((always_inline)) void count_below_in_turn(const Signed* magnitudes, std::size_t count,
                                                               const Signed* limits, std::uint64_t* below) {
  for (std::size_t half = 0; half < kLimits; half += kHalf) {
    static_assert(kHalf == 7);
    const Signed* const limit = limits + half;
    Signed c0 = 0, c1 = 0, c2 = 0, c3 = 0, c4 = 0, c5 = 0, c6 = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const Signed x = magnitudes[i];
      c0 -= x < limit[0] ? -1 : 0;
      c1 -= x < limit[1] ? -1 : 0;
      c2 -= x < limit[2] ? -1 : 0;
      c3 -= x < limit[3] ? -1 : 0;
      c4 -= x < limit[4] ? -1 : 0;
      c5 -= x < limit[5] ? -1 : 0;
      c6 -= x < limit[6] ? -1 : 0;
    }
    const Signed counted[kHalf] = {c0, c1, c2, c3, c4, c5, c6};
    for (std::size_t k = 0; k < kHalf; ++k) below[half + k] += static_cast<std::uint64_t>(counted[k]);
  }
}

template <class Signed>
void count_below_baseline(const Signed* magnitudes, std::size_t count, const Signed* limits, std::uint64_t* below) {
  count_below_in_turn(magnitudes, count, limits, below);
}

template <class Signed>
__attribute__((target("avx2"))) void count_below_avx2(const Signed* magnitudes, std::size_t count, const Signed* limits,
                                                      std::uint64_t* below) {
  count_below_in_turn(magnitudes, count, limits, below);
}

template <class Signed>
using CountBelow = void (*)(const Signed*, std::size_t, const Signed*, std::uint64_t*);

template <class Signed>
CountBelow<Signed> count_below() {
  static const bool avx2 = __builtin_cpu_supports("avx2") != 0;
  return avx2 ? count_below_avx2<Signed> : count_below_baseline<Signed>;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Tables
// ---------------------------------------------------------------------------------------------------------------------

/// What is counted while elements come; several tables of one kind, so that equal neighbours do not wait for each
/// other.
struct ElementCounter::Tables {
  template <DType D>
  static constexpr std::size_t kPatternTables = sizeof(BitsOf<D>) == 1 ? 4 : 2;
  static constexpr std::size_t kExponentTables = 4;

  ExponentHistogram counted;             ///< what the tables were emptied into
  std::uint64_t since_folded = 0;        ///< elements in the tables
  std::vector<std::uint32_t> patterns;   ///< of a narrow type
  std::vector<std::uint32_t> exponents;  ///< by the exponent's bits
  std::array<std::uint64_t, kLimits> below{};

  template <DType D>
  void add_patterns(const std::byte* stored, std::size_t count, const ScaleFactors& factors) {
    constexpr std::size_t kPatterns = std::size_t{1} << (8 * sizeof(BitsOf<D>));
    if (patterns.empty() && sizeof(BitsOf<D>) > 1 && count <= kFewElements) {
      for (std::size_t i = 0; i < count; ++i) add_stored<D>(counted, load<D>(stored, i), factors, 1);
      return;
    }
    patterns.resize(kPatternTables<D> * kPatterns);
    std::array<std::uint32_t*, kPatternTables<D>> table;
    for (std::size_t t = 0; t < table.size(); ++t) table[t] = patterns.data() + t * kPatterns;
    std::size_t i = 0;
    for (; i + table.size() <= count; i += table.size()) {
      for (std::size_t t = 0; t < table.size(); ++t) ++table[t][load<D>(stored, i + t)];
    }
    for (; i < count; ++i) ++table[0][load<D>(stored, i)];
    since_folded += count;
  }

  template <DType D>
  void fold_patterns(const ScaleFactors& factors, ExponentHistogram& into) const {
    constexpr std::size_t kPatterns = std::size_t{1} << (8 * sizeof(BitsOf<D>));
    for (std::size_t bits = 0; bits < kPatterns && !patterns.empty(); ++bits) {
      std::uint64_t count = 0;
      for (std::size_t t = 0; t < kPatternTables<D>; ++t) count += patterns[t * kPatterns + bits];
      if (count != 0) add_stored<D>(into, static_cast<BitsOf<D>>(bits), factors, count);
    }
  }

  /// float32 and float64.
  template <DType D>
  void add_wide(const std::byte* stored, std::size_t count, const ScaleFactors& factors) {
    using Bits = BitsOf<D>;
    using Signed = std::make_signed_t<Bits>;
    constexpr int kMantissaBits = std::countr_zero(Element<D>::kSmallestNormal);
    constexpr std::size_t kExponents = std::size_t{1} << (8 * sizeof(Bits) - 1 - kMantissaBits);
    exponents.resize(kExponentTables * kExponents);
    std::array<std::uint32_t*, kExponentTables> table;
    for (std::size_t t = 0; t < table.size(); ++t) table[t] = exponents.data() + t * kExponents;
    const std::array<Signed, kLimits> limits = limits_of<D>();

    alignas(64) Bits bits[kSubBlockElements];
    alignas(64) Signed magnitudes[kSubBlockElements];
    for (std::size_t first = 0; first < count; first += kSubBlockElements) {
      const std::size_t elements = std::min(kSubBlockElements, count - first);
      std::memcpy(bits, stored + first * sizeof(Bits), elements * sizeof(Bits));
      cpu::scale_chunk(kernels(), {reinterpret_cast<std::byte*>(bits), static_cast<std::uint32_t>(elements), D, 0},
                       factors);
      for (std::size_t i = 0; i < elements; ++i) magnitudes[i] = static_cast<Signed>(magnitude_bits<D>(bits[i]));
      const auto field = [&](std::size_t i) { return static_cast<std::size_t>(magnitudes[i] >> kMantissaBits); };
      const auto below_normal = [&] { return table[0][0] + table[1][0] + table[2][0] + table[3][0]; };
      const std::uint32_t below_normal_before = below_normal();
      std::size_t i = 0;
      for (; i + kExponentTables <= elements; i += kExponentTables) {
        ++table[0][field(i)];
        ++table[1][field(i + 1)];
        ++table[2][field(i + 2)];
        ++table[3][field(i + 3)];
      }
      for (; i < elements; ++i) ++table[0][field(i)];

      std::array<std::uint64_t, kLimits> here{};
      count_below<Signed>()(magnitudes, elements, limits.data(), here.data());
      for (std::size_t k = 0; k < kLimits; ++k) below[k] += here[k];
      const std::uint64_t finite = here[kLimits - 1], zeros = here[0];
      counted.zeros += zeros;
      if (finite < elements) add_nonfinite<D>(bits, elements);
      if (below_normal() - below_normal_before > zeros) add_subnormals<D>(bits, elements);
    }
    since_folded += count;
  }

  template <DType D>
  void add_nonfinite(const BitsOf<D>* bits, std::size_t count) {
    BitsOf<D> nan = 0, posinf = 0, neginf = 0;
    for (std::size_t i = 0; i < count; ++i) {
      nan += magnitude_bits<D>(bits[i]) >= Element<D>::kNan ? 1 : 0;
      posinf += bits[i] == Element<D>::kNonfinite ? 1 : 0;
      neginf += bits[i] == (Element<D>::kNonfinite | Element<D>::kSign) ? 1 : 0;
    }
    counted.nan += nan;
    counted.posinf += posinf;
    counted.neginf += neginf;
  }

  /// Whose exponents their exponent's bits do not tell.
  template <DType D>
  void add_subnormals(const BitsOf<D>* bits, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      if (is_subnormal<D>(bits[i])) counted.add(exponent_of_magnitude<D>(magnitude_bits<D>(bits[i])), 1);
    }
  }

  template <DType D>
  void fold_wide(ExponentHistogram& into) const {
    constexpr std::size_t kExponents = std::size_t{1}
                                       << (8 * sizeof(BitsOf<D>) - 1 - std::countr_zero(Element<D>::kSmallestNormal));
    constexpr int kBias = static_cast<int>(kExponents / 2) - 1;
    if (exponents.empty()) return;
    for (std::size_t field = 1; field + 1 < kExponents; ++field) {
      std::uint64_t count = 0;
      for (std::size_t t = 0; t < kExponentTables; ++t) count += exponents[t * kExponents + field];
      if (count != 0) into.add(static_cast<int>(field) - kBias, count);
    }
    const std::uint64_t zeros = below.front(), finite = below.back();
    for (std::size_t i = 0; i < kCasts; ++i) {
      const std::uint64_t* const under = &below[1 + 3 * i];
      into.casts[i].to_zero += under[0] - zeros;
      into.casts[i].to_subnormal += under[1] - under[0];
      into.casts[i].overflow += finite - under[2];
    }
  }

  template <DType D>
  static std::array<std::make_signed_t<BitsOf<D>>, kLimits> limits_of() {
    std::array<std::make_signed_t<BitsOf<D>>, kLimits> limits{};
    const auto set = [&](std::size_t k, BitsOf<D> bits) {
      limits[k] = static_cast<std::make_signed_t<BitsOf<D>>>(bits);
    };
    set(0, 1);
    for (std::size_t i = 0; i < kCasts; ++i) {
      set(1 + 3 * i, cast_limits<D>()[i].nonzero);
      set(2 + 3 * i, cast_limits<D>()[i].normal);
      set(3 + 3 * i, cast_limits<D>()[i].nonfinite);
    }
    set(kLimits - 1, Element<D>::kNonfinite);
    return limits;
  }

  template <DType D>
  static BitsOf<D> load(const std::byte* stored, std::size_t i) {
    BitsOf<D> bits;
    std::memcpy(&bits, stored + i * sizeof bits, sizeof bits);
    return bits;
  }

  static const cpu::Kernels& kernels() {
    static const cpu::Kernels& best = cpu::choose_kernels("");
    return best;
  }

  void fold(DType dtype, const ScaleFactors& factors, ExponentHistogram& into) const {
    with_dtype(dtype, [&]<DType D>() {
      if constexpr (sizeof(BitsOf<D>) > 2) {
        fold_wide<D>(into);
      } else {
        fold_patterns<D>(factors, into);
      }
    });
  }

  void empty() {
    std::fill(patterns.begin(), patterns.end(), 0u);
    std::fill(exponents.begin(), exponents.end(), 0u);
    below.fill(0);
    since_folded = 0;
  }
};

ElementCounter::ElementCounter(DType dtype, const ScaleFactors& factors)
    : dtype_(dtype), factors_(factors), tables_(std::make_unique<Tables>()) {}
ElementCounter::ElementCounter(ElementCounter&&) noexcept = default;
ElementCounter& ElementCounter::operator=(ElementCounter&&) noexcept = default;
ElementCounter::~ElementCounter() = default;

void ElementCounter::add(const std::byte* stored, std::size_t count) {
  with_dtype(dtype_, [&]<DType D>() {
    for (std::size_t first = 0; first < count;) {
      const std::size_t some = std::min<std::size_t>(count - first, kMostBetweenFolds);
      if (tables_->since_folded + some > kMostBetweenFolds) {
        tables_->fold(dtype_, factors_, tables_->counted);
        tables_->empty();
      }
      const std::byte* const at = stored + first * sizeof(BitsOf<D>);
      if constexpr (sizeof(BitsOf<D>) > 2) {
        tables_->add_wide<D>(at, some, factors_);
      } else {
        tables_->add_patterns<D>(at, some, factors_);
      }
      first += some;
    }
  });
}

ExponentHistogram ElementCounter::histogram() const {
  ExponentHistogram result = tables_->counted;
  tables_->fold(dtype_, factors_, result);
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Histograms
// ---------------------------------------------------------------------------------------------------------------------

std::uint64_t ExponentHistogram::finite_nonzero() const noexcept {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

std::uint64_t ExponentHistogram::elements() const noexcept {
  return zeros + nan + posinf + neginf + finite_nonzero();
}

void ExponentHistogram::add(int exponent, std::uint64_t count) {
  GRADCLIP_CHECK(exponent >= kLeastExponent && exponent <= kMostExponent, "an exponent that no float64 has");
  if (count == 0) return;
  if (counts.empty()) first = exponent;
  if (exponent < first) {
    counts.insert(counts.begin(), static_cast<std::size_t>(first - exponent), 0);
    first = exponent;
  }
  const auto place = static_cast<std::size_t>(exponent - first);
  if (place >= counts.size()) counts.resize(place + 1);
  counts[place] += count;
}

void ExponentHistogram::add(const ExponentHistogram& other) {
  zeros += other.zeros;
  nan += other.nan;
  posinf += other.posinf;
  neginf += other.neginf;
  for (std::size_t i = 0; i < other.counts.size(); ++i) add(other.first + static_cast<int>(i), other.counts[i]);
  for (std::size_t i = 0; i < casts.size(); ++i) {
    casts[i].to_zero += other.casts[i].to_zero;
    casts[i].to_subnormal += other.casts[i].to_subnormal;
    casts[i].overflow += other.casts[i].overflow;
  }
}

ExponentHistogram with_nonfinite_zeroed(ExponentHistogram histogram) noexcept {
  histogram.zeros += histogram.nan + histogram.posinf + histogram.neginf;
  histogram.nan = histogram.posinf = histogram.neginf = 0;
  return histogram;
}

}  // namespace gradclip
