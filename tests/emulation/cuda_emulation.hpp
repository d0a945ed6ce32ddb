#pragma once
// What kernels see instead of nvcc's built-ins when a host compiler compiles them for the tests.
//
// Types and declarations come from NVIDIA's own headers; here is what those declare for nvcc only. A thread of a block
// is a fiber; see block.hpp for what is checked.

#include <cuda_runtime.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <type_traits>

namespace emulation {

using Where = std::source_location;

constexpr unsigned kWarpSize = 32;

/// The running thread of a kernel.
struct Lane {
  uint3 thread;
  uint3 block;
  dim3 block_size;
  dim3 grid_size;
  unsigned linear;  ///< of the thread in its block, x fastest
};

// Not through a function: kernels read it in their inner loops.
extern constinit thread_local const Lane* running;

/// All threads of the block meet; whether any of them said true.
bool block_barrier(bool predicate, const Where& where);

/// The lanes of the mask meet and each gets the value of lane `source`. @param ordered  memory too, as in __syncwarp.
std::uint64_t warp_exchange(unsigned mask, std::uint64_t value, unsigned source, bool ordered, const Where& where);

/// The lanes of the mask meet and each gets all their values.
void warp_gather(unsigned mask, std::uint64_t value, std::uint64_t (&values)[kWarpSize], const Where& where);

/// Enqueues a kernel. @param name  for reports and for GRADCLIP_EMULATION_FAIL; may be empty.
cudaError_t launch(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> body);

/// Says that __shared__ variables exist once, so that blocks must not run side by side.
bool share_between_blocks();

template <class Value>
concept Exchangeable = std::is_trivially_copyable_v<Value> &&(sizeof(Value) == 4 || sizeof(Value) == 8);

template <Exchangeable Value>
Value exchange(unsigned mask, Value value, unsigned source, const Where& where) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_exchange(mask, bits, source, false, where);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class Value, class Operation>
Value reduce(unsigned mask, Value value, const Where& where, Operation operation) {
  std::uint64_t values[kWarpSize];
  warp_gather(mask, static_cast<std::uint64_t>(value), values, where);
  auto result = static_cast<Value>(values[std::countr_zero(mask)]);
  for (unsigned rest = mask & (mask - 1); rest != 0; rest &= rest - 1) {
    result = operation(result, static_cast<Value>(values[std::countr_zero(rest)]));
  }
  return result;
}

template <class Value, class Operation>
Value update(Value* address, Operation operation) {
  static_assert(std::is_integral_v<Value>, "the order of atomics on floats is not determined");
  const std::atomic_ref<Value> atomic(*address);
  Value old = atomic.load(std::memory_order_relaxed);
  while (!atomic.compare_exchange_weak(old, operation(old), std::memory_order_relaxed)) {
  }
  return old;
}

inline unsigned lane() {
  return running->linear % kWarpSize;
}

}  // namespace emulation

// The names below are CUDA's.
// NOLINTBEGIN(bugprone-reserved-identifier, readability-identifier-naming)

#define threadIdx (::emulation::running->thread)
#define blockIdx (::emulation::running->block)
#define blockDim (::emulation::running->block_size)
#define gridDim (::emulation::running->grid_size)
inline constexpr int warpSize = emulation::kWarpSize;

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#if defined(EMULATION_SHARED_STATIC)
// The sanitizers know the bounds of static variables and not those of thread_local ones.
#define __shared__ static
namespace emulation {
inline const bool kShared = share_between_blocks();
}
#else
#define __shared__ static thread_local
#endif
#if !defined(__clang__)
#define __builtin_assume(condition) static_cast<void>(0)
#endif

// ---- barriers

inline void __syncthreads(const emulation::Where& where = emulation::Where::current()) {
  emulation::block_barrier(false, where);
}
inline int __syncthreads_or(int predicate, const emulation::Where& where = emulation::Where::current()) {
  return emulation::block_barrier(predicate != 0, where) ? 1 : 0;
}
inline int __syncthreads_and(int predicate, const emulation::Where& where = emulation::Where::current()) {
  return emulation::block_barrier(predicate == 0, where) ? 0 : 1;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, const emulation::Where& where = emulation::Where::current()) {
  emulation::warp_exchange(mask, 0, emulation::lane(), true, where);
}
inline void __threadfence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
inline void __threadfence_block() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// ---- exchanges of a warp, in segments of `width` lanes

template <emulation::Exchangeable Value>
Value __shfl_sync(unsigned mask, Value value, int source, int width = warpSize,
                  const emulation::Where& where = emulation::Where::current()) {
  const unsigned within = static_cast<unsigned>(width) - 1;
  return emulation::exchange(mask, value, (emulation::lane() & ~within) | (static_cast<unsigned>(source) & within),
                             where);
}
template <emulation::Exchangeable Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned delta, int width = warpSize,
                     const emulation::Where& where = emulation::Where::current()) {
  const unsigned lane = emulation::lane();
  const bool inside = (lane & (static_cast<unsigned>(width) - 1)) >= delta;
  return emulation::exchange(mask, value, inside ? lane - delta : lane, where);
}
template <emulation::Exchangeable Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned delta, int width = warpSize,
                       const emulation::Where& where = emulation::Where::current()) {
  const unsigned lane = emulation::lane();
  const bool inside = (lane & (static_cast<unsigned>(width) - 1)) + delta < static_cast<unsigned>(width);
  return emulation::exchange(mask, value, inside ? lane + delta : lane, where);
}
template <emulation::Exchangeable Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lane_mask, int width = warpSize,
                      const emulation::Where& where = emulation::Where::current()) {
  const unsigned lane = emulation::lane();
  const unsigned source = lane ^ static_cast<unsigned>(lane_mask);
  const unsigned end = (lane | (static_cast<unsigned>(width) - 1)) + 1;  // earlier segments may be read, later may not
  return emulation::exchange(mask, value, source < end ? source : lane, where);
}

template <class Value>
requires std::same_as<Value, int> || std::same_as<Value, unsigned> Value
__reduce_add_sync(unsigned mask, Value value, const emulation::Where& where = emulation::Where::current()) {
  return emulation::reduce(mask, value, where, [](Value a, Value b) {
    return static_cast<Value>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  });
}
template <class Value>
requires std::same_as<Value, int> || std::same_as<Value, unsigned> Value
__reduce_max_sync(unsigned mask, Value value, const emulation::Where& where = emulation::Where::current()) {
  return emulation::reduce(mask, value, where, [](Value a, Value b) { return a < b ? b : a; });
}
template <class Value>
requires std::same_as<Value, int> || std::same_as<Value, unsigned> Value
__reduce_min_sync(unsigned mask, Value value, const emulation::Where& where = emulation::Where::current()) {
  return emulation::reduce(mask, value, where, [](Value a, Value b) { return b < a ? b : a; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value,
                                 const emulation::Where& where = emulation::Where::current()) {
  return emulation::reduce(mask, value, where, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __ballot_sync(unsigned mask, int predicate,
                              const emulation::Where& where = emulation::Where::current()) {
  return __reduce_or_sync(mask, predicate != 0 ? 1u << emulation::lane() : 0u, where);
}
inline int __any_sync(unsigned mask, int predicate, const emulation::Where& where = emulation::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate, const emulation::Where& where = emulation::Where::current()) {
  return __ballot_sync(mask, predicate, where) == mask ? 1 : 0;
}

// ---- atomics

template <class Value>
Value atomicAdd(Value* address, std::type_identity_t<Value> value) {
  return emulation::update(address, [value](Value old) { return static_cast<Value>(old + value); });
}
template <class Value>
Value atomicMax(Value* address, std::type_identity_t<Value> value) {
  return emulation::update(address, [value](Value old) { return old < value ? value : old; });
}
template <class Value>
Value atomicMin(Value* address, std::type_identity_t<Value> value) {
  return emulation::update(address, [value](Value old) { return value < old ? value : old; });
}
template <class Value>
Value atomicOr(Value* address, std::type_identity_t<Value> value) {
  return emulation::update(address, [value](Value old) { return static_cast<Value>(old | value); });
}
template <class Value>
Value atomicExch(Value* address, std::type_identity_t<Value> value) {
  return emulation::update(address, [value](Value) { return value; });
}
template <class Value>
Value atomicCAS(Value* address, std::type_identity_t<Value> expected, std::type_identity_t<Value> value) {
  return emulation::update(address, [expected, value](Value old) { return old == expected ? value : old; });
}

// ---- memory and bits

template <class Value>
Value __ldg(const Value* address) {
  return *address;
}
template <class Value>
Value __ldcs(const Value* address) {
  return *address;
}
template <class Value>
void __stcs(Value* address, std::type_identity_t<Value> value) {
  *address = value;
}
inline bool __isGlobal(const void*) {
  return true;
}

inline unsigned __float_as_uint(float value) {
  return std::bit_cast<unsigned>(value);
}
inline int __float_as_int(float value) {
  return std::bit_cast<int>(value);
}
inline float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
inline float __int_as_float(int bits) {
  return std::bit_cast<float>(bits);
}
inline long long __double_as_longlong(double value) {
  return std::bit_cast<long long>(value);
}
inline double __longlong_as_double(long long bits) {
  return std::bit_cast<double>(bits);
}
inline int __popc(unsigned value) {
  return std::popcount(value);
}
inline int __clz(int value) {
  return std::countl_zero(static_cast<unsigned>(value));
}
inline int __ffs(int value) {
  return value == 0 ? 0 : std::countr_zero(static_cast<unsigned>(value)) + 1;
}

// NOLINTEND(bugprone-reserved-identifier, readability-identifier-naming)
