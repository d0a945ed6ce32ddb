#pragma once
// The emulated devices and everything that lives on them. All of it is used under one lock: work of one stream may run
// on any host thread that waits, one at a time.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "arena.hpp"
#include "stream.hpp"

namespace emulation {

/// A memory pool as an account: which addresses it uses is the arena's affair.
struct Pool {
  int device = 0;
  bool destroyed = false;
  std::uint64_t release_threshold = 0;
  std::uint64_t used = 0, used_high = 0;
  std::uint64_t reserved = 0, reserved_high = 0;
};

struct Allocation {
  std::size_t bytes = 0;
  int device = 0;
  std::shared_ptr<Pool> pool;  ///< null: of cudaMalloc
  bool free_enqueued = false;  ///< cudaFreeAsync was called: the host may no longer name it
};

struct Device {
  std::size_t used = 0;  ///< by cudaMalloc and the pools' reserves
  std::size_t peak = 0;
  cudaError_t broken = cudaSuccess;  ///< every later call returns it
  std::shared_ptr<Pool> default_pool;
  std::shared_ptr<Stream> null_stream;
};

struct Machine {
  Machine();

  std::mutex mutex;
  std::vector<Device> devices;
  Arena arena;
  std::map<std::uintptr_t, Allocation> allocations;
  std::map<std::uintptr_t, std::size_t> pinned;
  std::map<cudaStream_t, std::shared_ptr<Stream>> streams;
  std::vector<std::shared_ptr<Stream>> orphans;  ///< destroyed with work still to do
  std::set<Event*> events;
  std::map<cudaMemPool_t, std::shared_ptr<Pool>> pools;
};

Machine& machine();

/// The calling host thread's device.
int& current_device();

/// Whether all later calls of a device return this error too.
[[nodiscard]] bool breaks_the_device(cudaError_t error);

/// The step of a stream that GRADCLIP_EMULATION_FAIL calls `name` ("kernel", "copy"): counts it and breaks the device
/// if it is to fail. @return whether it may be done.
bool may_execute(const std::string& name, int device);

}  // namespace emulation
