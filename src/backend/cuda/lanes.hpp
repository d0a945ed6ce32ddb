#pragma once
// What the threads of a block know of a chunk, and how they bring it together.
//
// A thread owns as many neighbouring lanes of a sub-block as one 16-byte vector has elements, so that a row of 64 lanes
// is read in whole vectors and a lane's sum never leaves its thread before the lanes are folded: 64 threads a block for
// float8, 128, 256 and 512 for wider types. Nothing here depends on the device, and no floating-point number goes
// through an atomic.

#include "gradclip/backend/cuda/magnitudes.hpp"
#include "gradclip/backend/cuda/vectors.hpp"
#include "gradclip/backend/reduction.hpp"
#include "gradclip/backend/term.hpp"

namespace gradclip::cuda {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

/// What a kernel is compiled for; the rest of a request is read at run time. `general` goes through pow or roundings
/// and is bound by them, not by memory.
enum class Terms { squares, products, general };

template <DType D, Terms T>
struct Geometry {
  /// Lanes of a thread: those of one 16-byte vector.
  static constexpr int kOwned = T == Terms::general ? 2 : kVectorBytes / static_cast<int>(sizeof(BitsOf<D>));
  static constexpr int kThreads = static_cast<int>(kLanes) / kOwned;  ///< of a sub-block
  static constexpr int kBlock = kThreads * static_cast<int>(kSubBlocks);
  static constexpr int kUnrolled = 16 / kOwned;  ///< rows
  static_assert(kThreads <= static_cast<int>(kWarp) && kBlock % static_cast<int>(kWarp) == 0);
};

/// A stored element after scaling. float8 has 256 elements: they are scaled once and looked up.
template <DType D>
class Scaling {
 public:
  /// @param table  shared by the block; complete after its next barrier
  __device__ Scaling(const ScaleFactors& factors, std::uint8_t* table) : factors_(factors), table_(table) {
    if constexpr (is_float8(D)) {
      for (unsigned bits = threadIdx.x; bits < 256; bits += blockDim.x) {
        table[bits] = scale_element<D>(static_cast<std::uint8_t>(bits), factors);
      }
    }
  }
  [[nodiscard]] __device__ __forceinline__ BitsOf<D> of(BitsOf<D> bits) const {
    if constexpr (is_float8(D)) return table_[bits];
    return scale_element<D>(bits, factors_);
  }
  template <int kCount>
  [[nodiscard]] __device__ __forceinline__ Vector<BitsOf<D>, kCount> of(Vector<BitsOf<D>, kCount> vector) const {
    if constexpr (is_float8(D)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) vector.element[i] = of(vector.element[i]);
    } else {
      scale_elements<D>(vector.element, factors_);
    }
    return vector;
  }

 private:
  const ScaleFactors& factors_;
  const std::uint8_t* table_;
};

/// What the threads of a block tell each other.
template <typename Magnitude>
struct BlockTotals {
  double power[kSubBlocks];
  double sum[kSubBlocks];
  Magnitude largest, smallest;  ///< as bits, which are ordered as the numbers are
  unsigned zeros, subnormals, nan, posinf, neginf, first_nonfinite;

  __device__ void clear(Magnitude infinity) {
    largest = 0;
    smallest = infinity;
    zeros = subnormals = nan = posinf = neginf = 0;
    first_nonfinite = kNoElement;
  }
};

/// What a thread knows of its lanes.
template <DType D, Terms T>
struct Owned {
  static constexpr int kOwned = Geometry<D, T>::kOwned;
  double power[kOwned];
  double sum[kOwned];
  ComputeOf<D> largest, smallest;
  unsigned zeros, subnormals;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int slot = 0; slot < kOwned; ++slot) power[slot] = sum[slot] = 0.0;
    largest = 0;
    smallest = infinity();
    zeros = subnormals = 0;
  }

  static __device__ __forceinline__ ComputeOf<D> infinity() {
    constexpr DType kWide = D == DType::float64 ? D : DType::float32;
    return bits_as<ComputeOf<D>>(Element<kWide>::kNonfinite);
  }

  /// Adds a finite value to a lane's sums.
  __device__ __forceinline__ void add(int slot, ComputeOf<D> value, const Term& term, bool terms) {
    double scaled = static_cast<double>(value);
    if (D == DType::float64 || T == Terms::general) scaled *= term.scaling;
    sum[slot] += scaled;
    if constexpr (T == Terms::squares) {
      power[slot] += power_by_products<2>(scaled);
    } else if constexpr (T == Terms::products) {
      if (term.p == 1.0) power[slot] += power_by_products<1>(scaled);
      if (term.p == 3.0) power[slot] += power_by_products<3>(scaled);
      if (term.p == 4.0) power[slot] += power_by_products<4>(scaled);
    } else {
      if (terms) power[slot] += term.of<D>(value, scaled);
    }
  }

  /// Takes an element that is already scaled; NaN and infinities go to the block's totals.
  template <typename Totals>
  __device__ __forceinline__ void take(int slot, BitsOf<D> bits, unsigned position, float scale_inv, const Term& term,
                                       bool terms, Totals& totals) {
    const ComputeOf<D> value = element_value<D>(bits, scale_inv);
    const ComputeOf<D> magnitude = value < 0 ? -value : value;
    if (!(magnitude < infinity())) {
      atomicAdd(value > 0 ? &totals.posinf : (value < 0 ? &totals.neginf : &totals.nan), 1u);
      atomicMin(&totals.first_nonfinite, position);
      return;
    }
    const bool zero = magnitude == 0;
    zeros += zero;
    subnormals += !zero && is_subnormal<D>(bits);
    largest = magnitude > largest ? magnitude : largest;
    smallest = !zero && magnitude < smallest ? magnitude : smallest;
    add(slot, value, term, terms);
  }

  /// Brings slot 1 to slot 0, and so on: after kOwned calls all are in place again.
  __device__ __forceinline__ void rotate() {
    const double first_power = power[0], first_sum = sum[0];
#pragma unroll
    for (int slot = 0; slot + 1 < kOwned; ++slot) {
      power[slot] = power[slot + 1];
      sum[slot] = sum[slot + 1];
    }
    power[kOwned - 1] = first_power;
    sum[kOwned - 1] = first_sum;
  }
};

/// A thread's share of a chunk: its lanes of one sub-block.
template <DType D>
struct Share {
  const BitsOf<D>* data;  ///< of the sub-block
  int count;              ///< elements of the sub-block
  int lane;               ///< the first
  unsigned position;      ///< of the sub-block in the chunk
};

/// The value of a finite element in a word.
template <DType D>
__device__ __forceinline__ float finite_value(unsigned word, int part, float scale_inv) {
  if constexpr (D == DType::float32) {
    return bits_as<float>(word);
  } else {
    constexpr int kWidth = 8 * static_cast<int>(sizeof(BitsOf<D>));
    const float value = Element<D>::widen_finite(word << (32 - kWidth * (part + 1)));
    return is_float8(D) ? value * scale_inv : value;
  }
}

/// The whole rows of a share, in vectors, as if all elements were finite. Returns how many rows, or -1 if they have to
/// be gone over once more: for NaN and infinities, which the largest magnitude shows, or for rare subnormals.
template <DType D, Terms T, bool kScaled>
__device__ __forceinline__ int take_vectors(Owned<D, T>& owned, const Share<D>& share, const Scaling<D>& scaling,
                                            float scale_inv, const Term& term) {
  constexpr int kRow = static_cast<int>(kLanes);
  constexpr int kOwned = Geometry<D, T>::kOwned;
  constexpr int kParts = WordMagnitudes<D>::kParts;
  constexpr int kWords = kOwned / kParts;
  [[maybe_unused]] constexpr int kUnrolled = kScaled ? 1 : Geometry<D, T>::kUnrolled;
  const int rows = share.count / kRow;
  WordMagnitudes<D> magnitudes;
#pragma unroll kUnrolled
  for (int row = 0; row < rows; ++row) {
    auto vector = load_vector<BitsOf<D>, kOwned>(share.data + row * kRow + share.lane);
    if constexpr (kScaled) vector = scaling.of(vector);
    const auto words = bits_as<Vector<unsigned, kWords>>(vector);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      magnitudes.take(words.element[word]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        owned.add(word * kParts + part, finite_value<D>(words.element[word], part, scale_inv), term, true);
      }
    }
  }
  const unsigned largest = magnitudes.largest(), smallest = magnitudes.smallest();
  const bool has_small = !kCountsSubnormals<D> && smallest < Element<D>::kSmallestNormal;
  if (largest >= Element<D>::kNonfinite || has_small || !keeps_order<D>(scale_inv)) return -1;
  owned.zeros = magnitudes.zeros();
  owned.subnormals = magnitudes.subnormals();
  owned.largest = element_value<D>(static_cast<BitsOf<D>>(largest), scale_inv);
  if (smallest < Element<D>::kNonfinite) {
    owned.smallest = element_value<D>(static_cast<BitsOf<D>>(smallest), scale_inv);
  }
  return rows;
}

/// The same for float64, whose numbers are compared as such; NaN and infinities spoil the sums.
template <Terms T, bool kScaled>
__device__ __forceinline__ int take_doubles(Owned<DType::float64, T>& owned, const Share<DType::float64>& share,
                                            const Scaling<DType::float64>& scaling, const Term& term) {
  constexpr DType kType = DType::float64;
  constexpr int kRow = static_cast<int>(kLanes);
  constexpr int kOwned = Geometry<kType, T>::kOwned;
  [[maybe_unused]] constexpr int kUnrolled = kScaled ? 1 : Geometry<kType, T>::kUnrolled;
  const int rows = share.count / kRow;
#pragma unroll kUnrolled
  for (int row = 0; row < rows; ++row) {
    auto vector = load_vector<BitsOf<kType>, kOwned>(share.data + row * kRow + share.lane);
    if constexpr (kScaled) vector = scaling.of(vector);
#pragma unroll
    for (int slot = 0; slot < kOwned; ++slot) {
      const double value = bits_as<double>(vector.element[slot]);
      const double magnitude = value < 0 ? -value : value;
      const bool zero = magnitude == 0;
      owned.zeros += zero;
      owned.largest = magnitude > owned.largest ? magnitude : owned.largest;
      owned.smallest = !zero && magnitude < owned.smallest ? magnitude : owned.smallest;
      owned.add(slot, value, term, true);
    }
  }
  double all = 0.0;
#pragma unroll
  for (int slot = 0; slot < kOwned; ++slot) all += owned.sum[slot] - owned.sum[slot];  // NaN unless finite
  const bool has_small = owned.smallest < bits_as<double>(Element<kType>::kSmallestNormal);
  return has_small || all != all ? -1 : rows;
}

template <DType D, Terms T, bool kScaled>
__device__ __forceinline__ int take_rows(Owned<D, T>& owned, const Share<D>& share, const Scaling<D>& scaling,
                                         float scale_inv, const Term& term) {
  if constexpr (D == DType::float64) {
    return take_doubles<T, kScaled>(owned, share, scaling, term);
  } else {
    return take_vectors<D, T, kScaled>(owned, share, scaling, scale_inv, term);
  }
}

/// Goes over a share, row by row.
template <DType D, Terms T, typename Totals>
__device__ __forceinline__ void gather(Owned<D, T>& owned, const Share<D>& share, bool changes,
                                       const Scaling<D>& scaling, float scale_inv, const Term& term, bool terms,
                                       Totals& totals) {
  constexpr int kRow = static_cast<int>(kLanes);
  owned.clear();
  int row = 0;
  if constexpr (T != Terms::general) {
    if (is_aligned(share.data)) {
      row = changes ? take_rows<D, T, true>(owned, share, scaling, scale_inv, term)
                    : take_rows<D, T, false>(owned, share, scaling, scale_inv, term);
    }
    if (row < 0) {
      owned.clear();
      row = 0;
    }
  }
  // What is left: a short row, a chunk that is not aligned, or everything once more with care. Rare enough for one
  // element at a time.
#pragma unroll 1
  for (; row * kRow < share.count; ++row) {
#pragma unroll 1
    for (int slot = 0; slot < Geometry<D, T>::kOwned; ++slot) {
      const int i = row * kRow + share.lane + slot;
      if (i < share.count) {
        const BitsOf<D> stored = load_element(share.data + i);
        const BitsOf<D> bits = changes ? scaling.of(stored) : stored;
        const unsigned position = share.position + static_cast<unsigned>(i);
        owned.take(0, bits, position, scale_inv, term, terms, totals);
      }
      owned.rotate();
    }
  }
}

template <int kCount>
__device__ __forceinline__ double fold_neighbours(double* lanes) {
  if constexpr (kCount > 1) {
#pragma unroll
    for (int slot = 0; slot < kCount / 2; ++slot) lanes[slot] += lanes[slot + kCount / 2];
    return fold_neighbours<kCount / 2>(lanes);
  } else {
    return lanes[0];
  }
}

/// Folds the lanes of a sub-block by halves: first across the threads that own them, then inside each. The result is in
/// the sub-block's first thread.
template <int kOwned>
__device__ __forceinline__ double fold_lanes(double (&lanes)[kOwned]) {
  constexpr int kThreads = static_cast<int>(kLanes) / kOwned;
#pragma unroll
  for (int half = kThreads / 2; half > 0; half /= 2) {
#pragma unroll
    for (int slot = 0; slot < kOwned; ++slot) {
      lanes[slot] += __shfl_down_sync(kAllLanes, lanes[slot], half, kThreads);
    }
  }
  return fold_neighbours<kOwned>(lanes);
}

/// Integers may go through atomics, in any order. One thread of a warp speaks for it.
__device__ __forceinline__ void add_of_warp(unsigned* total, unsigned mine) {
  const unsigned all = __reduce_add_sync(kAllLanes, mine);
  if (threadIdx.x % kWarp == 0 && all != 0) atomicAdd(total, all);
}
__device__ __forceinline__ void min_of_warp(unsigned* total, unsigned mine) {
  const unsigned least = __reduce_min_sync(kAllLanes, mine);
  if (threadIdx.x % kWarp == 0) atomicMin(total, least);
}
__device__ __forceinline__ void max_of_warp(unsigned* total, unsigned mine) {
  const unsigned most = __reduce_max_sync(kAllLanes, mine);
  if (threadIdx.x % kWarp == 0) atomicMax(total, most);
}
__device__ __forceinline__ void min_of_warp(unsigned long long* total, unsigned long long mine) {
#pragma unroll
  for (unsigned half = kWarp / 2; half > 0; half /= 2) {
    const unsigned long long other = __shfl_xor_sync(kAllLanes, mine, half);
    mine = other < mine ? other : mine;
  }
  if (threadIdx.x % kWarp == 0) atomicMin(total, mine);
}
__device__ __forceinline__ void max_of_warp(unsigned long long* total, unsigned long long mine) {
#pragma unroll
  for (unsigned half = kWarp / 2; half > 0; half /= 2) {
    const unsigned long long other = __shfl_xor_sync(kAllLanes, mine, half);
    mine = other > mine ? other : mine;
  }
  if (threadIdx.x % kWarp == 0) atomicMax(total, mine);
}

}  // namespace gradclip::cuda
