#pragma once
// Device memory of a test, filled from the host and read back.

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "gradclip/base/memory.hpp"
#include "gradclip/cuda_runtime/cuda_runtime.hpp"

namespace gradclip::test {

/// Bytes of the calling thread's current device.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    GRADCLIP_CUDA(cudaMalloc(&data_, bytes));
    GRADCLIP_CUDA(cudaMemsetAsync(data_, 0xEE, bytes, nullptr));
    GRADCLIP_CUDA(cudaDeviceSynchronize());
  }
  explicit DeviceMemory(std::span<const std::uint8_t> content) : DeviceMemory(content.size()) {
    if (size_ > 0) GRADCLIP_CUDA(cudaMemcpy(data_, content.data(), size_, cudaMemcpyHostToDevice));
    GRADCLIP_CUDA(cudaDeviceSynchronize());
  }
  ~DeviceMemory() {
    if (data_ != nullptr) cuda::check_quietly(cudaFree(data_));
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] Bytes bytes() const { return {static_cast<std::byte*>(data_), size_, MemorySpace::device}; }
  [[nodiscard]] std::vector<std::uint8_t> content() const {
    std::vector<std::uint8_t> values(size_);
    if (size_ > 0) GRADCLIP_CUDA(cudaMemcpy(values.data(), data_, size_, cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// What process `from` sends to process `to`, recognisable.
inline std::vector<std::uint8_t> message(int from, int to, std::size_t bytes) {
  std::vector<std::uint8_t> values(bytes);
  std::iota(values.begin(), values.end(), static_cast<std::uint8_t>(97 * from + 31 * to));
  return values;
}

}  // namespace gradclip::test
