#pragma once
// The benchmarks of the CUDA backend, where there is a device.

#include <memory>
#include <string>
#include <string_view>

#include "gradclip/backend/backend.hpp"

namespace gradclip::bench {

/// Names of device benchmarks begin with this.
inline constexpr std::string_view kDevice = "device ";

/// What device benchmarks are compared with: a copy from device memory to device memory, in bytes read and written.
inline constexpr std::string_view kDeviceCopy = "device copy";

/// Device memory of the array's size, and what moves bytes to and fro.
class DeviceArrays {
 public:
  /// @param content  in host memory: what the array holds
  DeviceArrays(ChosenBackend chosen, Bytes content);

  [[nodiscard]] Backend& backend() const noexcept { return *backend_; }
  [[nodiscard]] Bytes array() const noexcept { return array_.bytes(); }
  [[nodiscard]] Bytes copy() const noexcept { return copy_.bytes(); }
  [[nodiscard]] Bytes pinned() const noexcept { return pinned_.bytes(); }
  /// Results of as many chunks as the array has of any type.
  [[nodiscard]] Bytes results() const noexcept { return results_.bytes(); }

 private:
  std::unique_ptr<Backend> backend_;
  Buffer array_, copy_, pinned_, results_;
};

/// Registers copy, statistics and scaling for each type, and transfers from and to pinned memory.
void register_device_benchmarks(DeviceArrays& arrays);

}  // namespace gradclip::bench
