#pragma once
// How kernels reach global memory: whole vectors of 16 bytes where the address allows it.

#include <cstdint>
#include <type_traits>

#include "gradclip/base/element.hpp"
#include "gradclip/cuda_runtime/launch.hpp"

namespace gradclip::cuda {

inline constexpr int kVectorBytes = 16;

/// Blocks that a multiprocessor must hold at once: one, so that the compiler does not spill registers to fit more.
inline constexpr int kAnyOccupancy = 1;

/// The unsigned integer of a floating-point type's size, as atomics take it.
template <typename Number>
using MagnitudeBits = std::conditional_t<sizeof(Number) == 8, unsigned long long, unsigned>;

/// Tells the compiler what it cannot see in a pointer that comes out of a table: it then reads and writes with global
/// instructions instead of generic ones.
template <typename T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

__device__ __forceinline__ bool is_aligned(const void* pointer, int bytes = kVectorBytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<unsigned>(bytes) == 0;
}

/// Neighbouring elements in registers.
template <typename Bits, int kCount>
struct Vector {
  Bits element[kCount];
};

template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<1> {
  using Type = unsigned char;
};
template <>
struct WordsOf<2> {
  using Type = unsigned short;
};
template <>
struct WordsOf<4> {
  using Type = unsigned;
};
template <>
struct WordsOf<8> {
  using Type = uint2;
};
template <>
struct WordsOf<16> {
  using Type = uint4;
};

/// One load of kCount elements. @pre aligned to its size. Read once: it need not stay in the caches.
template <typename Bits, int kCount>
__device__ __forceinline__ Vector<Bits, kCount> load_vector(const Bits* at) {
  using Words = typename WordsOf<kCount* static_cast<int>(sizeof(Bits))>::Type;
  return bits_as<Vector<Bits, kCount>>(__ldcs(global(reinterpret_cast<const Words*>(at))));
}

template <typename Bits, int kCount>
__device__ __forceinline__ void store_vector(Bits* at, const Vector<Bits, kCount>& vector) {
  using Words = typename WordsOf<kCount* static_cast<int>(sizeof(Bits))>::Type;
  __stcs(global(reinterpret_cast<Words*>(at)), bits_as<Words>(vector));
}

template <typename Bits>
__device__ __forceinline__ Bits load_element(const Bits* at) {
  return *global(at);
}

}  // namespace gradclip::cuda
