#pragma once
// What a file of kernels needs. The only place that tells nvcc from a host compiler, which compiles the same kernels
// for the tests' emulation of a device.

#include <cstddef>
#include <tuple>
#include <utility>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "cuda_emulation.hpp"
#endif

namespace gradclip::cuda {

/// Launches kernel(arguments...) on grid × block threads. A grid of 0 is no launch.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), unsigned grid, unsigned block, cudaStream_t stream,
                   Arguments&&... arguments) {
  if (grid == 0) return cudaSuccess;
#if defined(__CUDACC__)
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...);
#else
  std::tuple<Parameters...> values(static_cast<Parameters>(std::forward<Arguments>(arguments))...);
  return emulation::launch("", dim3(grid), dim3(block), 0, stream, [kernel, values] { std::apply(kernel, values); });
#endif
}

}  // namespace gradclip::cuda
