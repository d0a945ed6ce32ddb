#pragma once
// Where bytes lie. Views only: no ownership here.

#include <cstddef>
#include <cstdint>

namespace gradclip {

enum class MemorySpace : std::uint8_t {
  host,    ///< pageable memory of this process
  pinned,  ///< host memory that a device can copy from and to asynchronously; plain host memory without a device
  device,  ///< memory that only the backend's own functions may touch
};

/// A run of bytes in one memory space. A plain value: whoever allocated the bytes owns them.
struct Bytes {
  std::byte* data = nullptr;
  std::size_t size = 0;
  MemorySpace space = MemorySpace::host;

  [[nodiscard]] Bytes subspan(std::size_t offset, std::size_t count) const noexcept {
    return {data + offset, count, space};
  }
};

}  // namespace gradclip
