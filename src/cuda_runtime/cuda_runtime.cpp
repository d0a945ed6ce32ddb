#include "gradclip/cuda_runtime/cuda_runtime.hpp"

#include <fmt/format.h>

#include "gradclip/base/error.hpp"

namespace gradclip::cuda {
namespace {

const char* advice_for(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return "lower --device-memory-budget, run fewer processes per device, or use --device cpu";
    case cudaErrorDevicesUnavailable:
      return "another program holds the device exclusively: see nvidia-smi";
    default:
      return "the device or its driver has failed: see the kernel's log (Xid) and nvidia-smi, or use --device cpu";
  }
}

/// "cudaMalloc(&data, bytes)" without its arguments.
std::string function_of(const char* call) {
  const std::string text(call);
  return text.substr(0, text.find('('));
}

}  // namespace

void check(cudaError_t status, const char* call, std::source_location where) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw Error(ExitCode::resources,
              {.where = "CUDA, " + function_of(call),
               .found = fmt::format("{} ({}): {}", cudaGetErrorName(status), static_cast<int>(status),
                                    cudaGetErrorString(status)),
               .expected = {},
               .advice = advice_for(status)},
              where);
}

void check_quietly(cudaError_t status) noexcept {
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
}

Stream::Stream() {
  GRADCLIP_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

Stream::~Stream() {
  if (stream_ != nullptr) check_quietly(cudaStreamDestroy(stream_));
}

Event::Event() {
  GRADCLIP_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}

Event::~Event() {
  if (event_ != nullptr) check_quietly(cudaEventDestroy(event_));
}

PinnedMemory::PinnedMemory(std::size_t bytes) : size_(bytes) {
  if (bytes > 0) GRADCLIP_CUDA(cudaHostAlloc(&data_, bytes, cudaHostAllocDefault));
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) check_quietly(cudaFreeHost(data_));
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

Devices usable_devices() {
  int count = 0;  // the call leaves it alone where it fails
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return {count, count == 0 ? "no CUDA device" : ""};
  static_cast<void>(cudaGetLastError());
  int driver = 0, runtime = 0;
  switch (status) {
    case cudaErrorInsufficientDriver:  // also where there is no driver at all: the version, 0, tells
      GRADCLIP_CUDA(cudaDriverGetVersion(&driver));
      GRADCLIP_CUDA(cudaRuntimeGetVersion(&runtime));
      if (driver == 0) return {0, "no NVIDIA driver is installed"};
      return {0, fmt::format("the NVIDIA driver is too old: it supports CUDA {}, and this build needs {}",
                             version_text(driver), version_text(runtime))};
    case cudaErrorStubLibrary:
      return {0, "the CUDA driver found is a stub, for linking only (lib/stubs is on LD_LIBRARY_PATH)"};
    case cudaErrorNoDevice:
      return {0, "no CUDA device (is CUDA_VISIBLE_DEVICES empty?)"};
    default:
      check(status, "cudaGetDeviceCount");
  }
  return {};
}

void use_device(int device) {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current == device) return;
  static_cast<void>(cudaGetLastError());
  GRADCLIP_CUDA(cudaSetDevice(device));
}

}  // namespace gradclip::cuda
