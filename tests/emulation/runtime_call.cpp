#include "runtime_call.hpp"

#include <string_view>

#include "ledger.hpp"
#include "settings.hpp"

namespace emulation {
namespace {

thread_local cudaError_t last = cudaSuccess;

/// How a function usually fails.
cudaError_t usual_failure(std::string_view name) {
  if (name.starts_with("cudaMalloc") || name == "cudaHostAlloc" || name.ends_with("CreateWithFlags")) {
    return cudaErrorMemoryAllocation;
  }
  if (name == "launch") return cudaErrorLaunchOutOfResources;
  if (name == "cudaGetDeviceCount") return cudaErrorUnknown;
  return cudaErrorLaunchFailure;
}

cudaError_t driver_error() {
  switch (settings().driver) {
    case Driver::present:
      return cudaSuccess;
    case Driver::none:
    case Driver::old:
      return cudaErrorInsufficientDriver;
    case Driver::stub:
      return cudaErrorStubLibrary;
    case Driver::no_device:
      return cudaErrorNoDevice;
    case Driver::broken:
      return cudaErrorUnknown;
  }
  return cudaErrorUnknown;
}

}  // namespace

cudaError_t enter(const char* name, bool of_device) {
  const auto failure = count_call(name, usual_failure(name));
  if (const cudaError_t error = driver_error(); error != cudaSuccess) return error;
  cudaError_t& broken = machine().devices[static_cast<std::size_t>(current_device())].broken;
  if (of_device && broken != cudaSuccess) return broken;
  if (!failure) return cudaSuccess;
  const auto error = static_cast<cudaError_t>(*failure);
  if (breaks_the_device(error)) broken = error;
  return error;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

cudaError_t last_error(bool clear) {
  const cudaError_t error = last;
  if (clear) last = state_of(current_device());
  return error;
}

}  // namespace emulation
