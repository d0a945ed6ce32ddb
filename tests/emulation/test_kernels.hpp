#pragma once
// Kernels of the emulation's own tests, and the small owners that those tests need.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <vector>

namespace emulation::test {

/// Every lane's result of one warp operation after the other, threads × kWarpResults.
constexpr int kWarpResults = 16;
cudaError_t launch_warp_operations(unsigned* out, unsigned threads, cudaStream_t stream);

/// The sum of 0 .. threads - 1 by shuffles, shared memory and a barrier, in every block.
cudaError_t launch_block_sum(unsigned* out, unsigned blocks, unsigned threads, cudaStream_t stream);

/// out[0] is incremented by every thread of the grid.
cudaError_t launch_count(unsigned long long* out, unsigned blocks, unsigned threads, cudaStream_t stream);

/// values[i] = values[i] * factor + addend for i < count.
cudaError_t launch_multiply_add(float* values, unsigned count, float factor, float addend, cudaStream_t stream);

/// *to = *from, by one thread.
cudaError_t launch_copy_first(float* to, const float* from, cudaStream_t stream);

/// order[k] is the index of the thread that came k-th.
cudaError_t launch_arrivals(unsigned* counter, unsigned* order, unsigned threads, cudaStream_t stream);

/// Sixteen warp-level exchanges per thread and nothing else.
cudaError_t launch_sixteen_exchanges(unsigned* out, unsigned blocks, cudaStream_t stream);

enum class Defect {
  divergent_barrier,   ///< half the block returns before the barrier
  different_barriers,  ///< halves wait at two barriers
  different_shuffles,  ///< halves of a warp wait at two shuffles
  missing_lane,        ///< half a warp returns before a shuffle of all lanes
  foreign_lane,        ///< a lane reads one that its mask does not name
  missing_barrier,     ///< shared memory is read as it is written
  missing_atomic,      ///< blocks count in the same places
  write_behind,        ///< one element beyond the end of `values`
  read_far_behind,     ///< a gigabyte beyond
};
cudaError_t launch_defect(Defect defect, unsigned* values, unsigned count, cudaStream_t stream);

/// Runs `body` in a new process, which reads the environment anew; its failures are the test's.
inline void in_own_process(const std::function<void()>& body) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        body();
        std::exit(testing::Test::HasFailure() ? 1 : 0);
      },
      testing::ExitedWithCode(0), "");
}

inline void expect_success(cudaError_t error) {
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorName(error);
}

/// Bytes of device memory with what is in them now, read back on the null stream.
template <class Value>
std::vector<Value> read_back(const Value* device, std::size_t count) {
  std::vector<Value> host(count);
  expect_success(cudaMemcpy(host.data(), device, count * sizeof(Value), cudaMemcpyDeviceToHost));
  return host;
}

template <class Value>
Value* device_array(std::size_t count) {
  void* memory = nullptr;
  expect_success(cudaMalloc(&memory, count * sizeof(Value)));
  return static_cast<Value*>(memory);
}

template <class Value>
Value* pinned_array(std::size_t count) {
  void* memory = nullptr;
  expect_success(cudaHostAlloc(&memory, count * sizeof(Value), cudaHostAllocDefault));
  return static_cast<Value*>(memory);
}

inline cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  expect_success(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

}  // namespace emulation::test
