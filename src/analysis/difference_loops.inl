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
  Doubles folded[4] = {xx[0] + xx[1], yy[0] + yy[1], xy[0] + xy[1], dd[0] + dd[1]};
  double lanes[4][kStep];
  std::memcpy(lanes, folded, sizeof lanes);
  for (std::size_t width = kStep / 2; width > 0; width /= 2) {
    for (std::size_t sum = 0; sum < 4; ++sum) {
      for (std::size_t lane = 0; lane < width; ++lane) lanes[sum][lane] += lanes[sum][lane + width];
    }
  }
  result.xx = lanes[0][0];
  result.yy = lanes[1][0];
  result.xy = lanes[2][0];
  result.dd = lanes[3][0];
  result.largest = 0.0;
  for (std::size_t lane = 0; lane < kStep; ++lane) {
    if (largest[0][lane] > result.largest) result.largest = largest[0][lane];
    if (largest[1][lane] > result.largest) result.largest = largest[1][lane];
  }
}

GRADCLIP_TARGET void ratios(const double* x, const double* y, std::size_t count, const TileRule& rule,
                            TileRatios& result) {
  const Longs magnitude = Longs{} + 0x7FFFFFFFFFFFFFFF;
  const Doubles none = {};
  const Doubles infinity = none + std::numeric_limits<double>::infinity();
  const Doubles relative = none + rule.relative, absolute = none + rule.absolute;
  const Doubles normal_x = none + rule.normal_x, normal_y = none + rule.normal_y;
  Doubles largest = {}, low = infinity, high = -infinity;
  Longs different = {}, broken = {};
  for (std::size_t i = 0; i < count; i += kStep) {
    Doubles a, b;
    std::memcpy(&a, x + i, sizeof a);
    std::memcpy(&b, y + i, sizeof b);
    const Doubles a_size = (Doubles)((Longs)a & magnitude);
    const Doubles b_size = (Doubles)((Longs)b & magnitude);
    const Doubles apart = (Doubles)((Longs)(a - b) & magnitude);
    different -= apart > absolute + relative * b_size;  // true is -1
    const Doubles quotient = apart / b_size;
    const Doubles relative_size = apart > none ? quotient : none;
    largest = relative_size > largest ? relative_size : largest;
    const Longs a_normal = a_size >= normal_x, b_normal = b_size >= normal_y;
    const Longs both = a_normal & b_normal;
    const Doubles ratio = b / a;
    const Doubles for_low = both ? ratio : infinity;
    const Doubles for_high = both ? ratio : -infinity;
    low = for_low < low ? for_low : low;
    high = for_high > high ? for_high : high;
    broken -= (a_normal & (b_size == none)) | (b_normal & (a_size == none));
  }
  result = {};
  result.low = std::numeric_limits<double>::infinity();
  result.high = -result.low;
  for (std::size_t lane = 0; lane < kStep; ++lane) {
    if (largest[lane] > result.largest_relative) result.largest_relative = largest[lane];
    if (low[lane] < result.low) result.low = low[lane];
    if (high[lane] > result.high) result.high = high[lane];
    result.different += static_cast<std::uint64_t>(different[lane]);
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

constexpr Kernels kKernels{sums, ratios, largest, widen_float32, widen_bfloat16, widen_float16};
