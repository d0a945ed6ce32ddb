#include "memory.hpp"

#include <algorithm>

#include "settings.hpp"

namespace emulation {
namespace {

constexpr std::size_t kGranularity = 512;

std::size_t accounted(std::size_t bytes) {
  return (bytes + kGranularity - 1) / kGranularity * kGranularity;
}

Device& device_at(int device) {
  return machine().devices[static_cast<std::size_t>(device)];
}

bool charge_device(Device& device, std::size_t bytes) {
  if (bytes > settings().memory || device.used > settings().memory - bytes) return false;
  device.used += bytes;
  device.peak = std::max(device.peak, device.used);
  return true;
}

bool charge(int device, Pool* pool, std::size_t bytes) {
  if (pool == nullptr) return charge_device(device_at(device), bytes);
  const std::uint64_t needed = pool->used + bytes;
  if (needed > pool->reserved) {
    if (!charge_device(device_at(device), needed - pool->reserved)) return false;
    pool->reserved = needed;
    pool->reserved_high = std::max(pool->reserved_high, needed);
  }
  pool->used = needed;
  pool->used_high = std::max(pool->used_high, needed);
  return true;
}

/// What a device does when memory runs out: finishes what it can, so that pending frees happen, and empties the pools.
void reclaim(int device) {
  const auto finish = [&](const std::shared_ptr<Stream>& stream) {
    if (stream->device == device) advance(*stream, stream->enqueued);
  };
  finish(device_at(device).null_stream);
  for (const auto& [handle, stream] : machine().streams) finish(stream);
  for (const auto& stream : machine().orphans) finish(stream);
  for (const auto& [handle, pool] : machine().pools) {
    if (pool->device == device) trim(*pool, 0);
  }
}

template <class Map>
auto containing(Map& map, std::uintptr_t address) {
  auto found = map.upper_bound(address);
  return found == map.begin() ? map.end() : std::prev(found);
}

}  // namespace

Range range_of(const void* pointer, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (machine().arena.contains(pointer)) {
    const auto found = containing(machine().allocations, address);
    if (found == machine().allocations.end()) return {Space::device, 0, false};
    const std::size_t offset = address - found->first;
    const Allocation& allocation = found->second;
    const bool whole = offset <= allocation.bytes && bytes <= allocation.bytes - offset && !allocation.free_enqueued;
    return {Space::device, allocation.device, whole};
  }
  const auto found = containing(machine().pinned, address);
  if (found == machine().pinned.end() || address - found->first >= found->second) return {};
  return {Space::pinned, 0, bytes <= found->second - (address - found->first)};
}

bool is_allocated(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const auto found = containing(machine().allocations, address);
  return found != machine().allocations.end() && address - found->first < found->second.bytes;
}

cudaError_t allocate(void** pointer, std::size_t bytes, int device, const std::shared_ptr<Pool>& pool) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > settings().memory) return cudaErrorMemoryAllocation;
  const std::size_t charged = accounted(bytes);
  if (!charge(device, pool.get(), charged)) {
    reclaim(device);
    if (!charge(device, pool.get(), charged)) return cudaErrorMemoryAllocation;
  }
  *pointer = machine().arena.take(bytes);
  if (*pointer == nullptr) report("the addresses of device memory are used up");
  machine().allocations[reinterpret_cast<std::uintptr_t>(*pointer)] = {bytes, device, pool};
  return cudaSuccess;
}

void release(void* pointer) {
  const auto found = machine().allocations.find(reinterpret_cast<std::uintptr_t>(pointer));
  const Allocation allocation = found->second;
  machine().allocations.erase(found);
  machine().arena.give_back(pointer, allocation.bytes);
  if (allocation.pool == nullptr) {
    device_at(allocation.device).used -= accounted(allocation.bytes);
    return;
  }
  allocation.pool->used -= accounted(allocation.bytes);
  if (allocation.pool->destroyed) trim(*allocation.pool, 0);
}

void trim(Pool& pool, std::uint64_t keep) {
  const std::uint64_t kept = std::min(pool.reserved, std::max(pool.used, keep));
  device_at(pool.device).used -= pool.reserved - kept;
  pool.reserved = kept;
}

void trim_pools(int device) {
  for (const auto& [handle, pool] : machine().pools) {
    if (pool->device == device) trim(*pool, pool->release_threshold);
  }
}

}  // namespace emulation
