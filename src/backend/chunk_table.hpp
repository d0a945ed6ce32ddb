#pragma once
// What a backend is given to work on, and what it gives back: plain values, the same on every device.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "gradclip/base/dtype.hpp"
#include "gradclip/base/element.hpp"

namespace gradclip {

/// Up to kChunkElements consecutive elements of one tensor, beginning at a multiple of kChunkElements of it.
struct Chunk {
  std::byte* data = nullptr;  ///< in the backend's working space, aligned to the element's size
  std::uint32_t count = 0;    ///< elements, at most kChunkElements
  DType dtype = DType::float32;
  std::uint32_t factors = 0;  ///< index into ChunkTable::factors
};

/// A batch of chunks of any tensors and types, worked on by one call.
struct ChunkTable {
  std::span<const Chunk> chunks;
  std::span<const ScaleFactors> factors;
};

/// The p of a p-norm: a real number > 0, or infinity.
struct NormOrder {
  double p = 2.0;

  [[nodiscard]] bool infinite() const noexcept { return std::isinf(p); }
  /// Whether powers are formed by products alone, so that every backend gives the same bits.
  [[nodiscard]] bool by_products() const noexcept { return p == 1.0 || p == 2.0 || p == 3.0 || p == 4.0; }
};

/// How the terms of the p-norm's sum are formed (docs/arithmetic.md).
enum class TermArithmetic : std::uint8_t {
  exact,      ///< |x|^p in float64
  reference,  ///< round(round(|x| / normalizer)^p), both roundings to the gradient's type, as the reference does
};

struct StatisticsRequest {
  NormOrder order;
  TermArithmetic terms = TermArithmetic::exact;
};

inline constexpr std::uint32_t kNoElement = std::numeric_limits<std::uint32_t>::max();

/// Statistics of the values of one chunk after scaling. Non-finite values are counted and placed, and add nothing to
/// the sums and extremes.
struct ChunkStatistics {
  double power_sum = 0.0;     ///< sum of (|x| * 2^-exponent)^p; 0 for p = infinity
  double signed_sum = 0.0;    ///< sum of x * 2^-exponent
  double max_abs = 0.0;       ///< largest finite magnitude
  double min_abs = HUGE_VAL;  ///< smallest non-zero finite magnitude, infinity if none
  std::int32_t exponent = 0;  ///< exponent_of(max_abs) of element.hpp, so that terms are at most 1; but 0 for float32
                              ///< and narrower with p in {1, 2, 3, 4, inf}, and for TermArithmetic::reference
  std::uint32_t zeros = 0;
  std::uint32_t subnormals = 0;  ///< of the gradient's own type, as stored; their values are not 0
  std::uint32_t nan = 0;
  std::uint32_t posinf = 0;
  std::uint32_t neginf = 0;
  std::uint32_t first_nonfinite = kNoElement;  ///< position in the chunk
  std::uint32_t reserved = 0;
};
static_assert(sizeof(ChunkStatistics) == 64, "one cache line; copied between devices as bytes");

}  // namespace gradclip
