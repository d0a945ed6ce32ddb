#include "machine.hpp"

#include <algorithm>

#include "ledger.hpp"
#include "settings.hpp"

namespace emulation {
namespace {

/// For the log: what the program used and what it left.
std::string describe() {
  const Machine& all = machine();
  std::size_t peak = 0;
  for (const Device& device : all.devices) peak = std::max(peak, device.peak);
  std::size_t unfinished = 0;
  for (const auto& [handle, stream] : all.streams) unfinished += stream->queue.size();
  return "peak_device_bytes=" + std::to_string(peak) + " live_allocations=" + std::to_string(all.allocations.size()) +
         " live_pinned=" + std::to_string(all.pinned.size()) + " live_streams=" + std::to_string(all.streams.size()) +
         " live_events=" + std::to_string(all.events.size()) +
         " live_pools=" + std::to_string(all.pools.size() - all.devices.size()) +
         " unfinished=" + std::to_string(unfinished);
}

}  // namespace

Machine::Machine() : devices(static_cast<std::size_t>(settings().devices)) {
  for (std::size_t i = 0; i < devices.size(); ++i) {
    devices[i].null_stream = std::make_shared<Stream>();
    devices[i].default_pool = std::make_shared<Pool>();
    devices[i].null_stream->device = devices[i].default_pool->device = static_cast<int>(i);
    pools[reinterpret_cast<cudaMemPool_t>(devices[i].default_pool.get())] = devices[i].default_pool;
  }
}

Machine& machine() {
  static Machine* const the_machine = [] {
    describe_at_exit(describe);
    return new Machine;  // never destroyed: static objects of the program may still use it
  }();
  return *the_machine;
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

bool breaks_the_device(cudaError_t error) {
  constexpr cudaError_t kBreaking[] = {
      cudaErrorECCUncorrectable,
      cudaErrorNvlinkUncorrectable,
      cudaErrorIllegalAddress,
      cudaErrorLaunchTimeout,
      cudaErrorAssert,
      cudaErrorHardwareStackError,
      cudaErrorIllegalInstruction,
      cudaErrorMisalignedAddress,
      cudaErrorInvalidAddressSpace,
      cudaErrorInvalidPc,
      cudaErrorLaunchFailure,
  };
  return std::find(std::begin(kBreaking), std::end(kBreaking), error) != std::end(kBreaking);
}

bool may_execute(const std::string& name, int device) {
  const int usual = name == "copy" ? cudaErrorLaunchFailure : cudaErrorIllegalAddress;
  const auto failure = count_call(name, usual);
  if (failure) machine().devices[static_cast<std::size_t>(device)].broken = static_cast<cudaError_t>(*failure);
  return !failure;
}

}  // namespace emulation
