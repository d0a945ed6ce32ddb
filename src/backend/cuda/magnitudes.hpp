#pragma once
// Extremes and counts of magnitudes by their bits, which grow with them: a few integer instructions on words of one,
// two or four elements, where floating-point numbers would need comparisons.

#include "gradclip/backend/cuda/vectors.hpp"

namespace gradclip::cuda {

/// Subnormals are common in gradients of these types, so they are counted at once; in the others any magnitude that
/// small makes a thread go over its elements again.
template <DType D>
constexpr bool kCountsSubnormals = is_float8(D) || D == DType::float16;

template <DType D>
class WordMagnitudes {
 public:
  static constexpr int kParts = 4 / static_cast<int>(sizeof(BitsOf<D>));  ///< elements of a word

  __device__ __forceinline__ WordMagnitudes() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      most_[part] = 0;
      least_[part] = kNone;
    }
  }

  __device__ __forceinline__ void take(unsigned word) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const unsigned magnitude = word & unit(part) * kMagnitude;
      const unsigned less_one = magnitude - unit(part);  // of 0 it has the highest bit, as no other has
      most_[part] = magnitude > most_[part] ? magnitude : most_[part];
      least_[part] = less_one < least_[part] ? less_one : least_[part];
      zeros_ += less_one >> 31;
      if constexpr (kCountsSubnormals<D>) small_ += (magnitude - unit(part) * Element<D>::kSmallestNormal) >> 31;
    }
  }

  [[nodiscard]] __device__ unsigned largest() const {
    unsigned most = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const unsigned here = most_[part] / unit(part);
      most = here > most ? here : most;
    }
    return most;
  }
  /// Of those that are not 0; above every magnitude if there is none.
  [[nodiscard]] __device__ unsigned smallest() const {
    unsigned least = kNone;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const unsigned here = least_[part] / unit(part);
      least = here < least ? here : least;
    }
    return least + 1;
  }
  [[nodiscard]] __device__ unsigned zeros() const {
    return zeros_;
  }
  [[nodiscard]] __device__ unsigned subnormals() const {
    return kCountsSubnormals<D> ? small_ - zeros_ : 0;
  }

 private:
  static constexpr unsigned kMagnitude = Element<D>::kSign - 1u;
  static constexpr unsigned kNone = 0xFFFFFFFEu;  ///< less one

  /// What a magnitude of 1 is at that place.
  static __device__ constexpr unsigned unit(int part) {
    return 1u << (part * 8 * static_cast<int>(sizeof(BitsOf<D>)));
  }

  unsigned most_[kParts];
  unsigned least_[kParts];  ///< less one
  unsigned zeros_ = 0, small_ = 0;
};

}  // namespace gradclip::cuda
