#pragma once
// Element types and reductions of the emulated NCCL.

#include <nccl.h>

#include <cstddef>

namespace emulation {

std::size_t size_of(ncclDataType_t type);
bool can_reduce(ncclDataType_t type, ncclRedOp_t reduction);

/// into[i] = reduction(into[i], from[i]), in host memory. @pre can_reduce
void reduce_into(std::byte* into, const std::byte* from, std::size_t count, ncclDataType_t type, ncclRedOp_t reduction);

}  // namespace emulation
