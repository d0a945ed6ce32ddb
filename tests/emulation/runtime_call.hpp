#pragma once
// The way into every function of the runtime API: count, fail where the environment asks for it, remember the error.

#include <cuda_runtime_api.h>

#include <mutex>

#include "machine.hpp"

namespace emulation {

using Lock = std::unique_lock<std::mutex>;

/// What a call must return at once: the driver's absence, a failure asked for, the device's own.
/// @param of_device  false for the calls that work without a device, and on a broken one.
cudaError_t enter(const char* name, bool of_device);

/// Makes an error the calling thread's last one.
cudaError_t remember(cudaError_t error);

/// The last error; cleared if `clear` and the device is not broken.
cudaError_t last_error(bool clear);

/// @param body  cudaError_t(Lock&), called with the machine locked.
template <class Body>
cudaError_t runtime_call(const char* name, Body&& body, bool of_device = true) {
  Lock lock(machine().mutex);
  cudaError_t error = enter(name, of_device);
  if (error == cudaSuccess) error = body(lock);
  return remember(error);
}

/// The error that calls of a device return; success as long as it works.
inline cudaError_t state_of(int device) {
  return machine().devices[static_cast<std::size_t>(device)].broken;
}

}  // namespace emulation
