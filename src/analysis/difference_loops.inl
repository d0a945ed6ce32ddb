// The loops of difference_kernels.hpp for the instruction set that GRADCLIP_TARGET names, in a namespace of its own.
// Vectors of the compiler's own kind: it cuts them into what the instruction set has. No lambdas and no shared inline
// functions here, which would not inherit the target (see src/backend/cpu/vector_loops.inl).

using Doubles = double __attribute__((vector_size(64)));
using Longs = long long __attribute__((vector_size(64)));
using HalfFloats = float __attribute__((vector_size(32)));
using HalfInts = std::uint32_t __attribute__((vector_size(32)));
using QuarterShorts = std::uint16_t __attribute__((vector_size(16)));

constexpr std::size_t kStep = 8;  // doubles of a vector
static_assert(kTileLanes == 2 * kStep);

/// Lanes of a tile's sum, the upper half of them in the second vector.
GRADCLIP_TARGET double folded(const Doubles (&halves)[2]) {
  const Doubles sum = halves[0] + halves[1];
  double lanes[kStep];
  std::memcpy(lanes, &sum, sizeof lanes);
  for (std::size_t width = kStep / 2; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

GRADCLIP_TARGET void sums(const double* x, const double* y, std::size_t count, double scaling, TileSums& result) {
  const Longs magnitude = Longs{} + 0x7FFFFFFFFFFFFFFF;
  const Doubles scale = Doubles{} + scaling;
  Doubles xx[2] = {}, yy[2] = {}, xy[2] = {}, dd[2] = {}, largest[2] = {};
  for (std::size_t i = 0; i < count; i += kTileLanes) {
    for (std::size_t half = 0; half < 2; ++half) {
      Doubles a, b;
      std::memcpy(&a, x + i + half * kStep, sizeof a);
      std::memcpy(&b, y + i + half * kStep, sizeof b);
      const Doubles apart = (Doubles)((Longs)(a - b) & magnitude);
      largest[half] = apart > largest[half] ? apart : largest[half];
      a = a * scale;
      b = b * scale;
      const Doubles difference = a - b;
      xx[half] = xx[half] + a * a;
      yy[half] = yy[half] + b * b;
      xy[half] = xy[half] + a * b;
      dd[half] = dd[half] + difference * difference;
    }
  }
  result.xx = folded(xx);
  result.yy = folded(yy);
  result.xy = folded(xy);
  result.dd = folded(dd);
  result.largest = 0.0;
  for (std::size_t lane = 0; lane < kStep; ++lane) {
    if (largest[0][lane] > result.largest) result.largest = largest[0][lane];
    if (largest[1][lane] > result.largest) result.largest = largest[1][lane];
  }
}

GRADCLIP_TARGET double squares(const double* x, std::size_t count, double scaling) {
  const Doubles scale = Doubles{} + scaling;
  Doubles xx[2] = {};
  for (std::size_t i = 0; i < count; i += kTileLanes) {
    for (std::size_t half = 0; half < 2; ++half) {
      Doubles a;
      std::memcpy(&a, x + i + half * kStep, sizeof a);
      a = a * scale;
      xx[half] = xx[half] + a * a;
    }
  }
  return folded(xx);
}

/// The extremes of ratios(), lane by lane.
struct Extremes {
  Doubles largest, low, high;
};

/// Divides, which is many times slower than all else here.
GRADCLIP_TARGET void raise(const double* x, const double* y, std::size_t count, const TileRule& rule,
                           Extremes& extremes) {
  const Longs magnitude = Longs{} + 0x7FFFFFFFFFFFFFFF;
  const Doubles none = {};
  const Doubles infinity = none + std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < count; i += kStep) {
    Doubles a, b;
    std::memcpy(&a, x + i, sizeof a);
    std::memcpy(&b, y + i, sizeof b);
    const Doubles a_size = (Doubles)((Longs)a & magnitude);
    const Doubles b_size = (Doubles)((Longs)b & magnitude);
    const Doubles apart = (Doubles)((Longs)(a - b) & magnitude);
    const Doubles quotient = apart / b_size;
    const Doubles relative_size = apart > none ? quotient : none;
    extremes.largest = relative_size > extremes.largest ? relative_size : extremes.largest;
    const Longs both = (a_size >= none + rule.normal_x) & (b_size >= none + rule.normal_y);
    const Doubles ratio = b / a;
    const Doubles for_low = both ? ratio : infinity;
    const Doubles for_high = both ? ratio : -infinity;
    extremes.low = for_low < extremes.low ? for_low : extremes.low;
    extremes.high = for_high > extremes.high ? for_high : extremes.high;
  }
}

// A quotient that beats an extreme e is found without dividing: p / q > e with q > 0 means p > e q, and so p >= the
// rounded e q, since rounding keeps order and p is a number of the type.
GRADCLIP_TARGET void ratios(const double* x, const double* y, std::size_t count, const TileRule& rule,
                            TileRatios& result) {
  constexpr std::size_t kGroup = 4 * kTileLanes;
  const Longs magnitude = Longs{} + 0x7FFFFFFFFFFFFFFF;
  const Doubles none = {};
  const Doubles relative = none + rule.relative, absolute = none + rule.absolute;
  const Doubles normal_x = none + rule.normal_x, normal_y = none + rule.normal_y;
  Extremes extremes = {none + result.largest_relative, none + result.low, none + result.high};
  Longs different = {}, unknown = {}, broken = {};
  for (std::size_t group = 0; group < count; group += kGroup) {
    const std::size_t end = group + kGroup < count ? group + kGroup : count;
    Longs beaten = {};
    for (std::size_t i = group; i < end; i += kStep) {
      Doubles a, b;
      std::memcpy(&a, x + i, sizeof a);
      std::memcpy(&b, y + i, sizeof b);
      const Doubles a_size = (Doubles)((Longs)a & magnitude);
      const Doubles b_size = (Doubles)((Longs)b & magnitude);
      const Doubles apart = (Doubles)((Longs)(a - b) & magnitude);
      different -= apart > absolute + relative * b_size;  // true is -1
      const Longs a_normal = a_size >= normal_x, b_normal = b_size >= normal_y;
      unknown -= ~(a_normal & b_normal) & ((a_size > none) | (b_size > none));
      broken -= (a_normal & (b_size == none)) | (b_normal & (a_size == none));
      const Doubles turned = (Doubles)((Longs)b ^ ((Longs)a & ~magnitude));  // b / a = turned / a_size
      beaten |= (apart > none) & (apart >= extremes.largest * b_size);
      beaten |= a_normal & b_normal & ((turned <= extremes.low * a_size) | (turned >= extremes.high * a_size));
    }
    long long any = 0;
    for (std::size_t lane = 0; lane < kStep; ++lane) any |= beaten[lane];
    if (any == 0) continue;
    raise(x + group, y + group, end - group, rule, extremes);
    // All lanes have to beat the best of them.
    for (std::size_t lane = 0; lane < kStep; ++lane) {
      if (extremes.largest[lane] > result.largest_relative) result.largest_relative = extremes.largest[lane];
      if (extremes.low[lane] < result.low) result.low = extremes.low[lane];
      if (extremes.high[lane] > result.high) result.high = extremes.high[lane];
    }
    extremes = {none + result.largest_relative, none + result.low, none + result.high};
  }
  result.different = 0;
  result.unknown = 0;
  result.broken = 0;
  for (std::size_t lane = 0; lane < kStep; ++lane) {
    result.different += static_cast<std::uint64_t>(different[lane]);
    result.unknown += static_cast<std::uint64_t>(unknown[lane]);
    result.broken += static_cast<std::uint64_t>(broken[lane]);
  }
}

GRADCLIP_TARGET double largest(const double* x, std::size_t count) {
  const Longs magnitude = Longs{} + 0x7FFFFFFFFFFFFFFF;
  const Doubles limit = Doubles{} + std::numeric_limits<double>::max();
  Doubles most = {};
  for (std::size_t i = 0; i < count; i += kStep) {
    Doubles a;
    std::memcpy(&a, x + i, sizeof a);
    a = (Doubles)((Longs)a & magnitude);
    const Longs larger = (a > most) & (a <= limit);
    most = larger ? a : most;
  }
  double result = 0.0;
  for (std::size_t lane = 0; lane < kStep; ++lane) {
    if (most[lane] > result) result = most[lane];
  }
  return result;
}

GRADCLIP_TARGET void widen_float32(const float* from, double* to, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kStep) {
    HalfFloats narrow;
    std::memcpy(&narrow, from + i, sizeof narrow);
    const Doubles wide = __builtin_convertvector(narrow, Doubles);
    std::memcpy(to + i, &wide, sizeof wide);
  }
}

GRADCLIP_TARGET void widen_bfloat16(const std::uint16_t* from, double* to, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kStep) {
    QuarterShorts narrow;
    std::memcpy(&narrow, from + i, sizeof narrow);
    const HalfInts bits = __builtin_convertvector(narrow, HalfInts) << 16;
    const Doubles wide = __builtin_convertvector((HalfFloats)bits, Doubles);
    std::memcpy(to + i, &wide, sizeof wide);
  }
}

// The exponent is moved by a product with a power of two, which makes normal numbers of subnormal ones on the way; what
// had the largest exponent is no number.
GRADCLIP_TARGET void widen_float16(const std::uint16_t* from, double* to, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kStep) {
    QuarterShorts narrow;
    std::memcpy(&narrow, from + i, sizeof narrow);
    const HalfInts bits = __builtin_convertvector(narrow, HalfInts);
    const HalfInts size = (bits & 0x7FFFu) << 13;
    const HalfFloats finite = (HalfFloats)size * 0x1p112F;
    const HalfInts infinite = (HalfInts)((bits & 0x7C00u) == 0x7C00u);
    const HalfInts wide_bits = ((HalfInts)finite & ~infinite) | ((size | 0x7F800000u) & infinite);
    const HalfFloats with_sign = (HalfFloats)(wide_bits | ((bits & 0x8000u) << 16));
    const Doubles wide = __builtin_convertvector(with_sign, Doubles);
    std::memcpy(to + i, &wide, sizeof wide);
  }
}

constexpr Kernels kKernels{sums, squares, ratios, largest, widen_float32, widen_bfloat16, widen_float16};
