#pragma once
// The inner loops of a comparison: tiles of finite numbers, one variant for each instruction set, the same bits from
// each. How sums are formed is in docs/arithmetic.md.

#include <cstddef>
#include <cstdint>
#include <limits>

namespace gradclip::difference {

/// Elements of a tile, and the lanes that its sums are formed in: element i belongs to lane i mod kLanes.
inline constexpr std::size_t kTileElements = 1024;
inline constexpr std::size_t kTileLanes = 16;
static_assert(kTileElements % kTileLanes == 0);

/// Sums over a tile's pairs (x, y), both multiplied by `scaling` first, folded by halves; and the largest |x - y|,
/// unscaled.
struct TileSums {
  double xx = 0.0;
  double yy = 0.0;
  double xy = 0.0;
  double dd = 0.0;  ///< of (x - y)^2
  double largest = 0.0;
};

/// What tiles that have differences need besides: extremes of all that were seen so far, counts of the last one.
struct TileRatios {
  double largest_relative = 0.0;                         ///< |x - y| / |y|; 0 where x = y
  double low = std::numeric_limits<double>::infinity();  ///< of y / x where both reach their normal numbers
  double high = -std::numeric_limits<double>::infinity();
  std::uint64_t different = 0;  ///< |x - y| > absolute + relative |y|
  std::uint64_t unknown = 0;    ///< not both 0 and not both normal numbers
  std::uint64_t broken = 0;     ///< one is 0 and the other a normal number: no ratio
};

struct TileRule {
  double relative = 0.0;
  double absolute = 0.0;
  double normal_x = 0.0;  ///< smallest normal number
  double normal_y = 0.0;
};

/// @param count  a multiple of kTileLanes, at most kTileElements; a short tile is filled up with zeros, which add
///               nothing to any result.
struct Kernels {
  void (*sums)(const double* x, const double* y, std::size_t count, double scaling, TileSums& result);
  double (*squares)(const double* x, std::size_t count, double scaling);  ///< sums() of x and x: xx
  void (*ratios)(const double* x, const double* y, std::size_t count, const TileRule& rule, TileRatios& result);
  double (*largest)(const double* x, std::size_t count);  ///< finite magnitude
  void (*widen_float32)(const float* from, double* to, std::size_t count);
  void (*widen_bfloat16)(const std::uint16_t* from, double* to, std::size_t count);
  void (*widen_float16)(const std::uint16_t* from, double* to, std::size_t count);
};

/// The best that this processor runs.
[[nodiscard]] const Kernels& kernels() noexcept;
/// Every variant that this processor runs, the plainest first; for tests. @return how many
[[nodiscard]] std::size_t all_kernels(const Kernels* (&variants)[3]) noexcept;

}  // namespace gradclip::difference
