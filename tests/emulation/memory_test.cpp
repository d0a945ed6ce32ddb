// Device memory: what copies are checked for, what the host may not touch, pools and the limit of a device.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "test_kernels.hpp"

namespace emulation::test {
namespace {

constexpr std::size_t kCount = 1000;

TEST(Memory, IsNotANumberUntilItIsWritten) {
  auto* const device = device_array<float>(kCount);
  for (const float value : read_back(device, kCount)) EXPECT_TRUE(std::isnan(value));
  expect_success(cudaFree(device));
}

TEST(Memory, CopiesAreCheckedForRange) {
  auto* const device = device_array<char>(kCount);
  std::vector<char> host(2 * kCount);
  EXPECT_EQ(cudaMemcpy(device, host.data(), kCount + 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device + 1, host.data(), kCount, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), device, 2 * kCount, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(device, 0, kCount + 1, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device + kCount, host.data(), 0, cudaMemcpyHostToDevice), cudaSuccess);
  expect_success(cudaMemcpy(device + kCount - 1, host.data(), 1, cudaMemcpyHostToDevice));
  auto* const pinned = pinned_array<char>(kCount);
  EXPECT_EQ(cudaMemcpy(pinned + 1, device, kCount, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  expect_success(cudaFreeHost(pinned));
  expect_success(cudaFree(device));
}

TEST(Memory, CopiesAreCheckedForKind) {
  auto* const device = device_array<char>(kCount);
  std::vector<char> host(kCount);
  EXPECT_EQ(cudaMemcpy(host.data(), device, kCount, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), host.data(), 1, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device, device, kCount, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  expect_success(cudaMemcpy(host.data(), device, kCount, cudaMemcpyDefault));
  expect_success(cudaFree(device));
  EXPECT_EQ(cudaMemcpy(host.data(), device, kCount, cudaMemcpyDeviceToHost), cudaErrorInvalidValue) << "freed";
  EXPECT_EQ(cudaFree(device), cudaErrorInvalidValue) << "freed twice";
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Memory, KnowsWhatAPointerPointsTo) {
  auto* const device = device_array<char>(kCount);
  auto* const pinned = pinned_array<char>(kCount);
  cudaPointerAttributes attributes{};
  expect_success(cudaPointerGetAttributes(&attributes, device + 5));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  expect_success(cudaPointerGetAttributes(&attributes, pinned));
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  expect_success(cudaPointerGetAttributes(&attributes, &attributes));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
  expect_success(cudaFreeHost(pinned));
  expect_success(cudaFree(device));
}

/// In a process of its own each, because the environment is read once.
class MemoryDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(MemoryDeathTest, TheHostReadsDeviceMemory) {
  EXPECT_DEATH(
      {
        const auto* const device = device_array<volatile int>(kCount);
        std::exit(device[3]);
      },
      "host access to device memory at 0x");
}

TEST_F(MemoryDeathTest, TheHostWritesDeviceMemoryAfterAKernel) {
  EXPECT_DEATH(
      {
        auto* const device = device_array<float>(kCount);
        expect_success(launch_multiply_add(device, kCount, 1.0f, 1.0f, nullptr));
        expect_success(cudaDeviceSynchronize());
        std::memset(device, 0, kCount);
      },
      "host access to device memory at 0x");
}

TEST_F(MemoryDeathTest, OtherFaultsEndAsEver) {
  EXPECT_DEATH(
      {
        static_cast<void>(device_array<int>(kCount));
        volatile std::uintptr_t nowhere = 64;
        *reinterpret_cast<volatile int*>(nowhere) = 1;  // NOLINT(performance-no-int-to-ptr)
      },
      "");
}

// AddressSanitizer reports it; elsewhere the kernel meets NaN.
TEST_F(MemoryDeathTest, AKernelAfterAFreeInAnotherStream) {
  const auto use_freed_memory = [] {
    cudaStream_t one = new_stream();
    cudaStream_t other = new_stream();
    void* device = nullptr;
    expect_success(cudaMallocAsync(&device, 64 * sizeof(float), one));
    expect_success(cudaMemsetAsync(device, 0, 64 * sizeof(float), one));
    expect_success(cudaFreeAsync(device, one));
    auto* const result = device_array<float>(1);
    expect_success(launch_copy_first(result, static_cast<const float*>(device), other));
    expect_success(cudaStreamSynchronize(one));
    expect_success(cudaStreamSynchronize(other));
    EXPECT_TRUE(std::isnan(read_back(result, 1)[0]));
  };
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH(use_freed_memory(), "use-after-poison");
#else
  in_own_process(use_freed_memory);
#endif
}

TEST_F(MemoryDeathTest, ACopyAfterAFreeInAnotherStream) {
  EXPECT_DEATH(
      {
        cudaStream_t one = new_stream();
        cudaStream_t other = new_stream();
        void* device = nullptr;
        expect_success(cudaMallocAsync(&device, kCount, one));
        auto* const pinned = pinned_array<char>(kCount);
        expect_success(cudaMemcpyAsync(pinned, device, kCount, cudaMemcpyDeviceToHost, other));
        expect_success(cudaFreeAsync(device, one));
        expect_success(cudaStreamSynchronize(one));
        expect_success(cudaStreamSynchronize(other));
      },
      "a copy uses memory that another stream has freed");
}

std::uint64_t attribute(cudaMemPool_t pool, cudaMemPoolAttr name) {
  std::uint64_t value = 0;
  expect_success(cudaMemPoolGetAttribute(pool, name, &value));
  return value;
}

TEST(Pool, KeepsMemoryUpToItsThreshold) {
  constexpr std::uint64_t kSize = 1 << 20;
  cudaStream_t stream = new_stream();
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  cudaMemPool_t pool = nullptr;
  expect_success(cudaMemPoolCreate(&pool, &properties));
  std::uint64_t threshold = ~std::uint64_t{0};
  expect_success(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  std::size_t before = 0, now = 0, total = 0;
  expect_success(cudaMemGetInfo(&before, &total));

  void* memory[3] = {};
  for (void*& pointer : memory) expect_success(cudaMallocFromPoolAsync(&pointer, kSize, pool, stream));
  EXPECT_EQ(attribute(pool, cudaMemPoolAttrUsedMemCurrent), 3 * kSize);
  for (void* pointer : memory) expect_success(cudaFreeAsync(pointer, stream));
  EXPECT_EQ(attribute(pool, cudaMemPoolAttrUsedMemCurrent), 3 * kSize) << "the frees have not run";
  EXPECT_EQ(cudaFreeAsync(memory[0], stream), cudaErrorInvalidValue) << "freed twice";
  expect_success(cudaStreamSynchronize(stream));
  EXPECT_EQ(attribute(pool, cudaMemPoolAttrUsedMemCurrent), 0u);
  EXPECT_EQ(attribute(pool, cudaMemPoolAttrUsedMemHigh), 3 * kSize);
  EXPECT_EQ(attribute(pool, cudaMemPoolAttrReservedMemCurrent), 3 * kSize);
  expect_success(cudaMemPoolTrimTo(pool, kSize));
  EXPECT_EQ(attribute(pool, cudaMemPoolAttrReservedMemCurrent), kSize);
  expect_success(cudaMemGetInfo(&now, &total));
  EXPECT_EQ(before - now, kSize);
  threshold = 0;
  expect_success(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  expect_success(cudaStreamSynchronize(stream));
  EXPECT_EQ(attribute(pool, cudaMemPoolAttrReservedMemCurrent), 0u);
  EXPECT_EQ(attribute(pool, cudaMemPoolAttrReservedMemHigh), 3 * kSize);
  expect_success(cudaMemPoolDestroy(pool));
  expect_success(cudaStreamDestroy(stream));
}

TEST_F(MemoryDeathTest, ADeviceHasOnlySoMuch) {
  in_own_process([&] {
    setenv("GRADCLIP_EMULATION_MEMORY", "1000000", 1);
    std::size_t free = 0, total = 0;
    expect_success(cudaMemGetInfo(&free, &total));
    EXPECT_EQ(total, 1'000'000u);
    void* first = nullptr;
    void* second = nullptr;
    expect_success(cudaMalloc(&first, 600'000));
    EXPECT_EQ(cudaMalloc(&second, 600'000), cudaErrorMemoryAllocation);
    EXPECT_EQ(second, nullptr);
    EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    expect_success(cudaFree(first));
    // A pool may take again what its stream has given back without the host waiting.
    for (int i = 0; i < 10; ++i) {
      expect_success(cudaMallocAsync(&second, 600'000, nullptr));
      expect_success(cudaFreeAsync(second, nullptr));
    }
  });
}

}  // namespace
}  // namespace emulation::test
