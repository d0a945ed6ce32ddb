// Memory and pools of the runtime API.

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "memory.hpp"
#include "runtime_call.hpp"
#include "settings.hpp"

using emulation::Lock;
using emulation::machine;
using emulation::Pool;
using emulation::Range;
using emulation::runtime_call;
using emulation::Space;

namespace {

constexpr std::size_t kPage = 4096;

std::uintptr_t number(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

std::shared_ptr<Pool> pool_of(cudaMemPool_t handle) {
  const auto found = machine().pools.find(handle);
  return found == machine().pools.end() ? nullptr : found->second;
}

cudaError_t allocate_pinned(void** pointer, std::size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (posix_memalign(pointer, kPage, bytes) != 0) return cudaErrorMemoryAllocation;
  std::memset(*pointer, 0xFF, bytes);
  machine().pinned[number(*pointer)] = bytes;
  return cudaSuccess;
}

cudaError_t allocate_from(void** pointer, std::size_t bytes, const std::shared_ptr<Pool>& pool, cudaStream_t stream) {
  if (pool == nullptr || emulation::stream_of(stream) == nullptr) return cudaErrorInvalidValue;
  return emulation::allocate(pointer, bytes, pool->device, pool);
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return runtime_call("cudaMalloc",
                      [&](Lock&) { return emulation::allocate(pointer, bytes, emulation::current_device(), nullptr); });
}

cudaError_t cudaFree(void* pointer) {
  return runtime_call("cudaFree", [&](Lock& lock) {
    if (pointer == nullptr) return cudaSuccess;
    const auto found = machine().allocations.find(number(pointer));
    if (found == machine().allocations.end() || found->second.free_enqueued) return cudaErrorInvalidValue;
    const int device = found->second.device;
    found->second.free_enqueued = true;
    emulation::wait_for_device(lock, device);
    if (emulation::state_of(device) == cudaSuccess) emulation::release(pointer);
    return emulation::state_of(device);
  });
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t handle) {
  return runtime_call("cudaMallocAsync", [&](Lock&) {
    const auto stream = emulation::stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    return allocate_from(pointer, bytes, machine().devices[static_cast<std::size_t>(stream->device)].default_pool,
                         handle);
  });
}

cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  return runtime_call("cudaMallocFromPoolAsync",
                      [&](Lock&) { return allocate_from(pointer, bytes, pool_of(pool), stream); });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t handle) {
  return runtime_call("cudaFreeAsync", [&](Lock&) {
    const auto stream = emulation::stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (pointer == nullptr) return cudaSuccess;
    const auto found = machine().allocations.find(number(pointer));
    if (found == machine().allocations.end() || found->second.free_enqueued || found->second.pool == nullptr) {
      return cudaErrorInvalidValue;
    }
    found->second.free_enqueued = true;
    emulation::enqueue(stream, [pointer] {
      emulation::release(pointer);
      return true;
    });
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return runtime_call("cudaHostAlloc", [&](Lock&) { return allocate_pinned(pointer, bytes); });
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return runtime_call("cudaMallocHost", [&](Lock&) { return allocate_pinned(pointer, bytes); });
}

cudaError_t cudaFreeHost(void* pointer) {
  return runtime_call("cudaFreeHost", [&](Lock& lock) {
    if (pointer == nullptr) return cudaSuccess;
    if (machine().pinned.count(number(pointer)) == 0) return cudaErrorInvalidValue;
    // Copies that have not run yet use it.
    for (int device = 0; device < emulation::settings().devices; ++device) emulation::wait_for_device(lock, device);
    machine().pinned.erase(number(pointer));
    std::free(pointer);
    return emulation::state_of(emulation::current_device());
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return runtime_call("cudaMemGetInfo", [&](Lock&) {
    *total = emulation::settings().memory;
    *free = *total - machine().devices[static_cast<std::size_t>(emulation::current_device())].used;
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return runtime_call("cudaPointerGetAttributes", [&](Lock&) {
    const Range range = emulation::range_of(pointer, 1);
    *attributes = {};
    attributes->device = range.device;
    void* const plain = const_cast<void*>(pointer);
    if (range.space == Space::device && range.whole) {
      attributes->type = cudaMemoryTypeDevice;
      attributes->devicePointer = plain;
    } else if (range.space == Space::pinned) {
      attributes->type = cudaMemoryTypeHost;
      attributes->hostPointer = attributes->devicePointer = plain;
    } else {
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = cudaInvalidDeviceId;
      attributes->hostPointer = plain;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return runtime_call("cudaDeviceGetDefaultMemPool", [&](Lock&) {
    if (device < 0 || device >= emulation::settings().devices) return cudaErrorInvalidDevice;
    *pool = reinterpret_cast<cudaMemPool_t>(machine().devices[static_cast<std::size_t>(device)].default_pool.get());
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* handle, const cudaMemPoolProps* properties) {
  return runtime_call("cudaMemPoolCreate", [&](Lock&) {
    if (properties->allocType != cudaMemAllocationTypePinned ||
        properties->location.type != cudaMemLocationTypeDevice || properties->location.id < 0 ||
        properties->location.id >= emulation::settings().devices) {
      return cudaErrorInvalidValue;
    }
    const auto pool = std::make_shared<Pool>();
    pool->device = properties->location.id;
    *handle = reinterpret_cast<cudaMemPool_t>(pool.get());
    machine().pools[*handle] = pool;
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t handle) {
  return runtime_call("cudaMemPoolDestroy", [&](Lock&) {
    const auto pool = pool_of(handle);
    if (pool == nullptr) return cudaErrorInvalidValue;
    if (pool == machine().devices[static_cast<std::size_t>(pool->device)].default_pool) return cudaErrorInvalidValue;
    pool->destroyed = true;
    emulation::trim(*pool, 0);
    machine().pools.erase(handle);
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, size_t keep) {
  return runtime_call("cudaMemPoolTrimTo", [&](Lock&) {
    const auto pool = pool_of(handle);
    if (pool == nullptr) return cudaErrorInvalidValue;
    emulation::trim(*pool, keep);
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
  return runtime_call("cudaMemPoolSetAttribute", [&](Lock&) {
    const auto pool = pool_of(handle);
    if (pool == nullptr) return cudaErrorInvalidValue;
    switch (attribute) {
      case cudaMemPoolReuseFollowEventDependencies:
      case cudaMemPoolReuseAllowOpportunistic:
      case cudaMemPoolReuseAllowInternalDependencies:
        return cudaSuccess;  // addresses are reused late whatever is allowed
      case cudaMemPoolAttrReleaseThreshold:
        std::memcpy(&pool->release_threshold, value, sizeof pool->release_threshold);
        return cudaSuccess;
      case cudaMemPoolAttrReservedMemHigh:
        pool->reserved_high = pool->reserved;
        return cudaSuccess;
      case cudaMemPoolAttrUsedMemHigh:
        pool->used_high = pool->used;
        return cudaSuccess;
      default:
        return cudaErrorInvalidValue;
    }
  });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
  return runtime_call("cudaMemPoolGetAttribute", [&](Lock&) {
    const auto pool = pool_of(handle);
    if (pool == nullptr) return cudaErrorInvalidValue;
    const auto give = [&](const auto& attribute_value) {
      std::memcpy(value, &attribute_value, sizeof attribute_value);
      return cudaSuccess;
    };
    switch (attribute) {
      case cudaMemPoolReuseFollowEventDependencies:
      case cudaMemPoolReuseAllowOpportunistic:
      case cudaMemPoolReuseAllowInternalDependencies:
        return give(int{1});
      case cudaMemPoolAttrReleaseThreshold:
        return give(pool->release_threshold);
      case cudaMemPoolAttrReservedMemCurrent:
        return give(pool->reserved);
      case cudaMemPoolAttrReservedMemHigh:
        return give(pool->reserved_high);
      case cudaMemPoolAttrUsedMemCurrent:
        return give(pool->used);
      case cudaMemPoolAttrUsedMemHigh:
        return give(pool->used_high);
      default:
        return cudaErrorInvalidValue;
    }
  });
}

}  // extern "C"
