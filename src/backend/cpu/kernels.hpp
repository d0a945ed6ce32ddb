#pragma once
// Statistics, scaling and combining of chunks on a CPU, and the variants of their inner loops: one for each instruction
// set, the same bits from each.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "gradclip/backend/chunk_table.hpp"
#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/element.hpp"

namespace gradclip::cpu {

/// The types whose elements are scaled by arithmetic, DType's first four; float8's are looked up.
inline constexpr std::size_t kScaledTypes = 4;
/// The powers that have inner loops of their own, as an index: 0 for p = infinity (no terms), else p.
inline constexpr std::size_t kVectorPowers = 5;

/// What the inner loop gives for one sub-block. The extremes mean something only if signed_sum is finite: any NaN or
/// infinity makes it NaN or infinite, and then the sub-block is done again element by element.
struct SubBlock {
  double power_sum = 0.0;
  double signed_sum = 0.0;
  double max_abs = 0.0;
  double min_abs = 0.0;  ///< zeros included
};

/// The small elements of one sub-block.
struct SmallElements {
  std::uint32_t zeros = 0;
  std::uint32_t subnormals = 0;
  double min_abs = 0.0;  ///< smallest non-zero magnitude, infinity if there is none
};

/// Lane sums of x × scaling, folded, and the extremes of x. `scaling` is for float64; for float8 it is scale_inv, which
/// its x are multiplied by; the others' x are taken as they are.
/// @pre for float8: 2^8 × scale_inv is a float32 number
using Accumulate = SubBlock (*)(const void* data, std::size_t rows, double scaling);

/// The same of elements as they are after scaling, without a place for them: for factors that Scale takes.
using AccumulateScaled = SubBlock (*)(const void* data, std::size_t rows, const ScaleFactors& factors, double scaling);

/// Of the stored elements: float8's scale_inv plays no part.
/// @pre no NaN or infinity among the data.
using CountSmall = SmallElements (*)(const void* data, std::size_t rows);

/// scale_element of `count` elements; from == to or no overlap.
/// @pre changes_bits(factors), and ClipStep::in_float64 only for float64.
using Scale = void (*)(const void* from, void* to, std::size_t count, const ScaleFactors& factors);

/// table[x] of `count` bytes x; from == to or no overlap.
using LookUp = void (*)(const std::uint8_t* from, std::uint8_t* to, std::size_t count, const std::uint8_t* table);

/// One set of inner loops, by type and power. Data are aligned to the element; where they come in
/// rows these are whole, of kLanes elements, at least one, at most kSubBlockElements elements together: the caller pads
/// a short last row with zeros.
struct Kernels {
  std::string_view name;  ///< as GRADCLIP_CPU_KERNELS takes it
  std::array<std::array<Accumulate, kVectorPowers>, kDTypeCount> accumulate;
  std::array<std::array<AccumulateScaled, kVectorPowers>, kScaledTypes> accumulate_scaled;
  std::array<CountSmall, kDTypeCount> count_small;
  std::array<Scale, kScaledTypes> scale;
  LookUp look_up;
};

extern const Kernels kBaselineKernels;  ///< any x86-64
extern const Kernels kAvx2Kernels;      ///< AVX2, FMA, F16C
extern const Kernels kAvx512Kernels;    ///< AVX-512 F, BW, DQ, VL

/// The variants that this processor and its operating system can run, the best first.
[[nodiscard]] std::span<const Kernels* const> supported_kernels();

/// The variant of a name. "" takes the best.
/// @throws Error usage for a name that is unknown or that this processor cannot run.
[[nodiscard]] const Kernels& choose_kernels(std::string_view name);

/// Statistics of one chunk, a pure function of its elements, factors and request: see chunk_table.hpp and
/// reduction.hpp.
[[nodiscard]] ChunkStatistics chunk_statistics(const Kernels& kernels, const Chunk& chunk, const ScaleFactors& factors,
                                               const StatisticsRequest& request);

/// Replaces the elements of a chunk by their scaled and clipped values.
void scale_chunk(const Kernels& kernels, const Chunk& chunk, const ScaleFactors& factors);

/// The scaled values of a chunk in float64: what a Partial dimension combines. @param out chunk.count numbers.
void widen_chunk(const Kernels& kernels, const Chunk& chunk, const ScaleFactors& factors, double* out);

/// Converts the elements of `from` and stores them in `into`, or adds them to it.
void accumulate_chunk(const Chunk& into, const Chunk& from, const ScaleFactors& factors, bool add);

/// What a stored element is worth, for float8 with its scale_inv.
template <DType D>
double value_of(BitsOf<D> bits, double scale_inv) {
  return static_cast<double>(element_value<D>(bits, static_cast<float>(scale_inv)));
}

/// Folds `count` (a power of two) numbers by halves: a[j] += a[j + count / 2], and so on. The sum is a[0].
inline double fold(double* a, std::size_t count) {
  for (std::size_t half = count / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) a[j] += a[j + half];
  }
  return a[0];
}

}  // namespace gradclip::cpu
