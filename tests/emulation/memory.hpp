#pragma once
// Device memory and pinned host memory: who has how much, and what a pointer points to.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "machine.hpp"

namespace emulation {

enum class Space { pageable, pinned, device };

struct Range {
  Space space = Space::pageable;
  int device = 0;
  bool whole = true;  ///< all bytes lie in one allocation that the host may name
};

Range range_of(const void* pointer, std::size_t bytes);

/// Whether a device address is in use: until its free has run, not only until it was enqueued.
bool is_allocated(const void* pointer);

/// Device memory on a device's account or a pool's; brings forward what streams have to do where memory is short.
cudaError_t allocate(void** pointer, std::size_t bytes, int device, const std::shared_ptr<Pool>& pool);
void release(void* pointer);

/// Returns a pool's memory to the device except what is used and what is to be kept.
void trim(Pool& pool, std::uint64_t keep);
void trim_pools(int device);

}  // namespace emulation
