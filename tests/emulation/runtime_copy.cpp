// Copies of the runtime API.

#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "memory.hpp"
#include "runtime_call.hpp"
#include "settings.hpp"

using emulation::Lock;
using emulation::Range;
using emulation::runtime_call;
using emulation::Space;
using emulation::Stream;

namespace {

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
  Range to_range;
  Range from_range;
};

bool agree(cudaMemcpyKind kind, bool to_device, bool from_device) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

/// Memory that is freed between the call and the copy's turn lacks an order between two streams.
void check_again(const void* pointer, const Range& then) {
  if (then.space == Space::pageable) return;
  const Range now = emulation::range_of(pointer, 1);
  if (now.space != then.space || (now.space == Space::device && !emulation::is_allocated(pointer))) {
    emulation::report("a copy uses memory that another stream has freed");
  }
}

void enqueue_copy(const std::shared_ptr<Stream>& stream, const Copy& copy, std::shared_ptr<std::vector<char>> staged) {
  emulation::enqueue(stream, [copy, staged = std::move(staged), device = stream->device] {
    if (!emulation::may_execute("copy", device)) return true;
    check_again(copy.to, copy.to_range);
    if (staged == nullptr) check_again(copy.from, copy.from_range);
    std::memcpy(copy.to, staged == nullptr ? copy.from : staged->data(), copy.bytes);
    return true;
  });
}

/// @param synchronous  the call is cudaMemcpy, which waits unless both sides are on devices.
cudaError_t copy_on(Lock& lock, const std::shared_ptr<Stream>& stream, void* to, const void* from, std::size_t bytes,
                    cudaMemcpyKind kind, bool synchronous) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  const Copy copy{to, from, bytes, emulation::range_of(to, bytes), emulation::range_of(from, bytes)};
  const bool to_device = copy.to_range.space == Space::device;
  const bool from_device = copy.from_range.space == Space::device;
  if (to == nullptr || from == nullptr || !copy.to_range.whole || !copy.from_range.whole) return cudaErrorInvalidValue;
  if (!agree(kind, to_device, from_device)) return cudaErrorInvalidValue;

  std::shared_ptr<std::vector<char>> staged;
  if (copy.from_range.space == Space::pageable && to_device) {
    // The call returns when the bytes are taken, which may be before they arrive.
    const auto* const first = static_cast<const char*>(from);
    staged = std::make_shared<std::vector<char>>(first, first + bytes);
  }
  enqueue_copy(stream, copy, std::move(staged));
  const bool waits = copy.to_range.space == Space::pageable || (synchronous && !(to_device && from_device));
  if (waits) {
    const std::uint64_t position = stream->enqueued;
    emulation::wait_until(lock, [&] { return emulation::advance(*stream, position); });
  }
  return emulation::state_of(stream->device);
}

}  // namespace

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return runtime_call("cudaMemcpy", [&](Lock& lock) {
    return copy_on(lock, emulation::stream_of(nullptr), to, from, bytes, kind, true);
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return runtime_call("cudaMemcpyAsync", [&](Lock& lock) {
    return copy_on(lock, emulation::stream_of(stream), to, from, bytes, kind, false);
  });
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t handle) {
  return runtime_call("cudaMemsetAsync", [&](Lock&) {
    const auto stream = emulation::stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (bytes == 0) return cudaSuccess;
    const Range range = emulation::range_of(pointer, bytes);
    if (range.space != Space::device || !range.whole) return cudaErrorInvalidValue;
    emulation::enqueue(stream, [=] {
      check_again(pointer, range);
      std::memset(pointer, value, bytes);
      return true;
    });
    return cudaSuccess;
  });
}

}  // extern "C"
