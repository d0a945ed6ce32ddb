// Names and texts of the runtime's errors: the real library's, for those that the emulation returns or is asked for.

#include <cuda_runtime_api.h>

namespace {

struct Text {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define GRADCLIP_ERROR(name, text) \
  Text {                           \
    name, #name, text              \
  }

constexpr Text kTexts[] = {
    GRADCLIP_ERROR(cudaSuccess, "no error"),
    GRADCLIP_ERROR(cudaErrorInvalidValue, "invalid argument"),
    GRADCLIP_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    GRADCLIP_ERROR(cudaErrorInitializationError, "initialization error"),
    GRADCLIP_ERROR(cudaErrorCudartUnloading, "driver shutting down"),
    GRADCLIP_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    GRADCLIP_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    GRADCLIP_ERROR(cudaErrorStubLibrary, "CUDA driver is a stub library"),
    GRADCLIP_ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    GRADCLIP_ERROR(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    GRADCLIP_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    GRADCLIP_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    GRADCLIP_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    GRADCLIP_ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    GRADCLIP_ERROR(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"),
    GRADCLIP_ERROR(cudaErrorNvlinkUncorrectable, "uncorrectable NVLink error detected during the execution"),
    GRADCLIP_ERROR(cudaErrorOperatingSystem, "OS call failed or operation not supported on this OS"),
    GRADCLIP_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    GRADCLIP_ERROR(cudaErrorNotReady, "device not ready"),
    GRADCLIP_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    GRADCLIP_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    GRADCLIP_ERROR(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    GRADCLIP_ERROR(cudaErrorAssert, "device-side assert triggered"),
    GRADCLIP_ERROR(cudaErrorHardwareStackError, "hardware stack error"),
    GRADCLIP_ERROR(cudaErrorIllegalInstruction, "an illegal instruction was encountered"),
    GRADCLIP_ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    GRADCLIP_ERROR(cudaErrorInvalidAddressSpace, "operation not supported on global/shared address space"),
    GRADCLIP_ERROR(cudaErrorInvalidPc, "invalid program counter"),
    GRADCLIP_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    GRADCLIP_ERROR(cudaErrorNotPermitted, "operation not permitted"),
    GRADCLIP_ERROR(cudaErrorNotSupported, "operation not supported"),
    GRADCLIP_ERROR(cudaErrorSystemNotReady, "system not yet initialized"),
    GRADCLIP_ERROR(cudaErrorSystemDriverMismatch, "system has unsupported display driver / cuda driver combination"),
    GRADCLIP_ERROR(cudaErrorUnknown, "unknown error"),
};

#undef GRADCLIP_ERROR

constexpr Text kUnrecognized{cudaErrorUnknown, "unrecognized error code", "unrecognized error code"};

const Text& text_of(cudaError_t error) {
  for (const Text& text : kTexts) {
    if (text.error == error) return text;
  }
  return kUnrecognized;
}

}  // namespace

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  return text_of(error).name;
}
const char* cudaGetErrorString(cudaError_t error) {
  return text_of(error).text;
}

}  // extern "C"
