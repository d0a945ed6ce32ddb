// The devices of the runtime API, and its errors.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "ledger.hpp"
#include "runtime_call.hpp"
#include "settings.hpp"

using emulation::Lock;
using emulation::machine;
using emulation::runtime_call;

namespace {

constexpr int kOldDriver = 12000;
constexpr int kMultiprocessors = 4;
constexpr int kMaximumBlock = 1024;
constexpr std::size_t kSharedBytes = std::size_t{48} << 10;

bool exists(int device) {
  return device >= 0 && device < emulation::settings().devices;
}

cudaDeviceProp properties_of(int device) {
  cudaDeviceProp properties{};
  std::strcpy(properties.name, "Emulated GPU");
  std::memcpy(properties.uuid.bytes, "gradclip-device", 15);
  properties.uuid.bytes[15] = static_cast<char>(device);
  properties.totalGlobalMem = emulation::settings().memory;
  properties.sharedMemPerBlock = kSharedBytes;
  properties.regsPerBlock = 65536;
  properties.warpSize = 32;
  properties.maxThreadsPerBlock = kMaximumBlock;
  properties.maxThreadsDim[0] = properties.maxThreadsDim[1] = kMaximumBlock;
  properties.maxThreadsDim[2] = 64;
  properties.maxGridSize[0] = 0x7fffffff;
  properties.maxGridSize[1] = properties.maxGridSize[2] = 65535;
  properties.major = 9;
  properties.multiProcessorCount = kMultiprocessors;
  properties.maxThreadsPerMultiProcessor = 2048;
  properties.concurrentKernels = 1;
  properties.asyncEngineCount = 2;
  properties.unifiedAddressing = 1;
  properties.memoryPoolsSupported = 1;
  properties.pciBusID = device + 1;
  return properties;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return runtime_call(
      "cudaGetDeviceCount",
      [&](Lock&) {
        *count = emulation::settings().devices;
        return cudaSuccess;
      },
      false);
}

cudaError_t cudaSetDevice(int device) {
  return runtime_call(
      "cudaSetDevice",
      [&](Lock&) {
        if (!exists(device)) return cudaErrorInvalidDevice;
        emulation::current_device() = device;
        return emulation::state_of(device);
      },
      false);
}

cudaError_t cudaGetDevice(int* device) {
  return runtime_call(
      "cudaGetDevice",
      [&](Lock&) {
        *device = emulation::current_device();
        return cudaSuccess;
      },
      false);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return runtime_call("cudaGetDeviceProperties", [&](Lock&) {
    if (!exists(device)) return cudaErrorInvalidDevice;
    *properties = properties_of(device);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return runtime_call("cudaDeviceGetAttribute", [&](Lock&) {
    if (!exists(device)) return cudaErrorInvalidDevice;
    const cudaDeviceProp properties = properties_of(device);
    switch (attribute) {
      case cudaDevAttrMaxThreadsPerBlock:
        *value = properties.maxThreadsPerBlock;
        break;
      case cudaDevAttrWarpSize:
        *value = properties.warpSize;
        break;
      case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = static_cast<int>(properties.sharedMemPerBlock);
        break;
      case cudaDevAttrMultiProcessorCount:
        *value = properties.multiProcessorCount;
        break;
      case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = properties.maxThreadsPerMultiProcessor;
        break;
      case cudaDevAttrComputeCapabilityMajor:
        *value = properties.major;
        break;
      case cudaDevAttrComputeCapabilityMinor:
        *value = properties.minor;
        break;
      case cudaDevAttrMemoryPoolsSupported:
      case cudaDevAttrUnifiedAddressing:
      case cudaDevAttrConcurrentKernels:
        *value = 1;
        break;
      case cudaDevAttrAsyncEngineCount:
        *value = properties.asyncEngineCount;
        break;
      case cudaDevAttrPciBusId:
        *value = properties.pciBusID;
        break;
      case cudaDevAttrPciDeviceId:
      case cudaDevAttrPciDomainId:
      case cudaDevAttrIntegrated:
      case cudaDevAttrPageableMemoryAccess:
        *value = 0;
        break;
      default:
        emulation::report("cudaDeviceGetAttribute: attribute " + std::to_string(attribute) + " is not emulated");
    }
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  return runtime_call("cudaDeviceGetPCIBusId", [&](Lock&) {
    if (!exists(device)) return cudaErrorInvalidDevice;
    if (bytes < 13) return cudaErrorInvalidValue;
    std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02X:00.0", static_cast<unsigned>(device + 1) & 0xFFu);
    return cudaSuccess;
  });
}

cudaError_t cudaDriverGetVersion(int* version) {
  using emulation::Driver;
  emulation::count_call("cudaDriverGetVersion", 0);
  const Driver driver = emulation::settings().driver;
  *version = driver == Driver::none ? 0 : driver == Driver::old ? kOldDriver : CUDART_VERSION;
  return emulation::remember(driver == Driver::stub ? cudaErrorStubLibrary : cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  emulation::count_call("cudaRuntimeGetVersion", 0);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const Lock lock(machine().mutex);
  return emulation::last_error(true);
}

cudaError_t cudaPeekAtLastError() {
  const Lock lock(machine().mutex);
  return emulation::last_error(false);
}

}  // extern "C"
