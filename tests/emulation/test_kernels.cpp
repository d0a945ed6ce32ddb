#include "test_kernels.hpp"

#include <utility>

#include "cuda_emulation.hpp"

namespace emulation::test {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr unsigned kMaximumWarps = 32;

template <class... Parameters, class... Arguments>
cudaError_t start(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, cudaStream_t stream,
                  Arguments... arguments) {
  return emulation::launch("test", dim3(blocks), dim3(threads), 0, stream,
                           [=] { kernel(static_cast<Parameters>(arguments)...); });
}

__global__ void __launch_bounds__(1024) warp_operations(unsigned* __restrict__ out) {
  const unsigned lane = threadIdx.x % static_cast<unsigned>(warpSize);
  unsigned* const mine = out + std::size_t{threadIdx.x} * kWarpResults;
  mine[0] = __shfl_sync(kAll, lane, 3);
  mine[1] = __shfl_sync(kAll, lane, 3, 8);
  mine[2] = __shfl_down_sync(kAll, lane, 1);
  mine[3] = __shfl_down_sync(kAll, lane, 2, 4);
  mine[4] = __shfl_xor_sync(kAll, lane, 16);
  mine[5] = __shfl_xor_sync(kAll, lane, 4, 4);
  mine[6] = __shfl_up_sync(kAll, lane, 1);
  mine[7] = __reduce_add_sync(kAll, lane);
  mine[8] = __reduce_max_sync(kAll, lane);
  mine[9] = static_cast<unsigned>(__reduce_min_sync(kAll, static_cast<int>(lane) - 5));
  mine[10] = __ballot_sync(kAll, lane % 2 == 1);
  mine[11] = static_cast<unsigned>(__any_sync(kAll, lane == 7));
  mine[12] = static_cast<unsigned>(__all_sync(kAll, lane == 7));
  mine[13] = static_cast<unsigned>(__shfl_down_sync(kAll, lane + 0.25, 8) * 4.0);
  // The halves of a warp meet among themselves.
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  mine[14] = lane < 16 ? __shfl_sync(half, lane, 5) : __shfl_xor_sync(half, lane, 1);
  mine[15] = __float_as_uint(__ldg(mine) == 3u ? 1.0f : 0.0f);
  __syncwarp();
}

__global__ void block_sum(unsigned* out) {
  __shared__ unsigned sums[kMaximumWarps];
  unsigned sum = threadIdx.x;
  for (unsigned distance = 16; distance != 0; distance /= 2) sum += __shfl_down_sync(kAll, sum, distance);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  const int any = __syncthreads_or(threadIdx.x == 1 ? 1 : 0);
  if (threadIdx.x == 0) {
    unsigned total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += sums[warp];
    out[blockIdx.x] = any != 0 ? total : 0u;
  }
  __syncthreads();
}

__global__ void count(unsigned long long* out) {
  atomicAdd(out, 1ull);
}

__global__ void multiply_add(float* values, unsigned count, float factor, float addend) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] = values[i] * factor + addend;
}

__global__ void copy_first(float* to, const float* from) {
  *to = *from;
}

__global__ void arrivals(unsigned* counter, unsigned* order) {
  order[atomicAdd(counter, 1u)] = threadIdx.x;
}

__global__ void sixteen_exchanges(unsigned* out) {
  unsigned value = threadIdx.x;
  for (int i = 0; i < 16; ++i) value = __shfl_xor_sync(kAll, value, 1);
  if (threadIdx.x == 0) out[blockIdx.x] = value;
}

__global__ void divergent_barrier() {
  if (threadIdx.x < blockDim.x / 2) __syncthreads();
}

__global__ void different_barriers() {
  if (threadIdx.x >= blockDim.x / 2) {
    __syncthreads();
    return;
  }
  __syncthreads();
}

__global__ void different_shuffles() {
  if (threadIdx.x % 32 < 16) {
    __shfl_sync(kAll, 1, 0);
  } else {
    __shfl_sync(kAll, 2, 0);
  }
}

__global__ void missing_lane() {
  if (threadIdx.x % 32 < 16) __shfl_sync(kAll, 1, 0);
}

__global__ void foreign_lane() {
  if (threadIdx.x % 32 < 16) __shfl_sync(0x0000ffffu, 1, 20);
}

__global__ void missing_barrier(unsigned* values) {
  __shared__ unsigned shared[64];
  shared[threadIdx.x] = threadIdx.x;
  values[threadIdx.x] = shared[(threadIdx.x + 32) % 64];
}

__global__ void missing_atomic(unsigned* values) {
  for (int i = 0; i < 100; ++i) ++values[threadIdx.x];
}

__global__ void write_at(unsigned* values, std::size_t index) {
  if (threadIdx.x == 0) values[index] = 7;
}

__global__ void read_at(unsigned* values, std::size_t index) {
  if (threadIdx.x == 0) values[0] = values[index];
}

}  // namespace

cudaError_t launch_warp_operations(unsigned* out, unsigned threads, cudaStream_t stream) {
  return start(warp_operations, 1, threads, stream, out);
}

cudaError_t launch_block_sum(unsigned* out, unsigned blocks, unsigned threads, cudaStream_t stream) {
  return start(block_sum, blocks, threads, stream, out);
}

cudaError_t launch_count(unsigned long long* out, unsigned blocks, unsigned threads, cudaStream_t stream) {
  return start(count, blocks, threads, stream, out);
}

cudaError_t launch_multiply_add(float* values, unsigned count, float factor, float addend, cudaStream_t stream) {
  return start(multiply_add, (count + 63) / 64, 64, stream, values, count, factor, addend);
}

cudaError_t launch_copy_first(float* to, const float* from, cudaStream_t stream) {
  return start(copy_first, 1, 1, stream, to, from);
}

cudaError_t launch_arrivals(unsigned* counter, unsigned* order, unsigned threads, cudaStream_t stream) {
  return start(arrivals, 1, threads, stream, counter, order);
}

cudaError_t launch_sixteen_exchanges(unsigned* out, unsigned blocks, cudaStream_t stream) {
  return start(sixteen_exchanges, blocks, 256, stream, out);
}

cudaError_t launch_defect(Defect defect, unsigned* values, unsigned count, cudaStream_t stream) {
  switch (defect) {
    case Defect::divergent_barrier:
      return start(divergent_barrier, 1, 64, stream);
    case Defect::different_barriers:
      return start(different_barriers, 1, 64, stream);
    case Defect::different_shuffles:
      return start(different_shuffles, 1, 32, stream);
    case Defect::missing_lane:
      return start(missing_lane, 1, 32, stream);
    case Defect::foreign_lane:
      return start(foreign_lane, 1, 32, stream);
    case Defect::missing_barrier:
      return start(missing_barrier, 1, 64, stream, values);
    case Defect::missing_atomic:
      return start(missing_atomic, 8, 32, stream, values);
    case Defect::write_behind:
      return start(write_at, 1, 32, stream, values, std::size_t{count});
    case Defect::read_far_behind:
      return start(read_at, 1, 32, stream, values, std::size_t{1} << 28);
  }
  return cudaErrorInvalidValue;
}

}  // namespace emulation::test
