#pragma once
// The kernels' launchers. Every pointer is to device memory; nothing waits.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gradclip/backend/chunk_table.hpp"

namespace gradclip::cuda {

/// A chunk as a kernel reads it.
struct DeviceChunk {
  std::byte* data = nullptr;
  std::uint32_t count = 0;
  std::uint32_t factors = 0;   ///< index into the table of factors
  std::uint32_t position = 0;  ///< in the caller's table, which is sorted by type before a launch
  std::uint32_t reserved = 0;
};

/// Chunks of one type.
struct DeviceTable {
  const DeviceChunk* chunks = nullptr;
  const ScaleFactors* factors = nullptr;
  std::uint32_t count = 0;
};

/// @param out  of the caller's whole table: chunk c's result goes to out[c.position].
cudaError_t launch_statistics(DType dtype, const DeviceTable& table, const StatisticsRequest& request,
                              ChunkStatistics* out, cudaStream_t stream);

cudaError_t launch_scale(DType dtype, const DeviceTable& table, cudaStream_t stream);

/// One chunk's addends and result.
struct CombineTable {
  DeviceTable addends;           ///< chunk-major: addend `rank` of chunk i is chunks[i × ranks + rank]
  double* const* out = nullptr;  ///< one per chunk
  std::uint32_t ranks = 0;
  PartialOperation operation = PartialOperation::sum;
  double divisor = 1.0;
};
cudaError_t launch_combine(DType dtype, const CombineTable& table, cudaStream_t stream);

/// Chunk i of `from` is converted into, or added to, the chunk at into[i].
cudaError_t launch_accumulate(DType into_dtype, DType from_dtype, std::byte* const* into, const DeviceTable& from,
                              bool add, cudaStream_t stream);

}  // namespace gradclip::cuda
