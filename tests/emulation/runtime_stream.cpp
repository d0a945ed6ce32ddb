// Streams and events of the runtime API.

#include <cuda_runtime_api.h>

#include "memory.hpp"
#include "runtime_call.hpp"
#include "stream.hpp"

using emulation::Event;
using emulation::Lock;
using emulation::machine;
using emulation::Record;
using emulation::runtime_call;
using emulation::Stream;

namespace {

Event* event_of(cudaEvent_t handle) {
  auto* const event = reinterpret_cast<Event*>(handle);
  return machine().events.count(event) != 0 ? event : nullptr;
}

cudaError_t after_waiting(int device) {
  emulation::trim_pools(device);
  return emulation::state_of(device);
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return runtime_call("cudaStreamCreateWithFlags", [&](Lock&) {
    if ((flags & ~static_cast<unsigned>(cudaStreamNonBlocking)) != 0) return cudaErrorInvalidValue;
    const auto stream = std::make_shared<Stream>();
    stream->device = emulation::current_device();
    stream->waits_for_null = flags != cudaStreamNonBlocking;
    *handle = reinterpret_cast<cudaStream_t>(stream.get());
    machine().streams[*handle] = stream;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return runtime_call("cudaStreamDestroy", [&](Lock&) {
    const auto found = machine().streams.find(handle);
    if (found == machine().streams.end()) return cudaErrorInvalidResourceHandle;
    if (!found->second->idle()) machine().orphans.push_back(found->second);
    machine().streams.erase(found);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return runtime_call("cudaStreamSynchronize", [&](Lock& lock) {
    const auto stream = emulation::stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    const std::uint64_t position = stream->enqueued;
    emulation::wait_until(lock, [&] { return emulation::advance(*stream, position); });
    return after_waiting(stream->device);
  });
}

// A query is the time for one step: who polls sees the stream come along, who asks once sees that it has not finished.
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return runtime_call("cudaStreamQuery", [&](Lock&) {
    const auto stream = emulation::stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (!stream->idle()) emulation::advance(*stream, stream->finished + 1);
    if (emulation::state_of(stream->device) != cudaSuccess) return emulation::state_of(stream->device);
    return stream->idle() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  return runtime_call("cudaStreamWaitEvent", [&](Lock&) {
    const auto stream = emulation::stream_of(handle);
    const Event* const event = event_of(event_handle);
    if (stream == nullptr || event == nullptr) return cudaErrorInvalidResourceHandle;
    if (event->record == nullptr) return cudaSuccess;
    emulation::enqueue(stream, [record = event->record] {
      return record->reached || emulation::advance(*record->stream, record->position);
    });
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return runtime_call("cudaDeviceSynchronize", [&](Lock& lock) {
    emulation::wait_for_device(lock, emulation::current_device());
    return after_waiting(emulation::current_device());
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  return runtime_call("cudaEventCreateWithFlags", [&](Lock&) {
    auto* const event = new Event;
    event->device = emulation::current_device();
    event->timing = (flags & cudaEventDisableTiming) == 0;
    machine().events.insert(event);
    *handle = reinterpret_cast<cudaEvent_t>(event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return runtime_call("cudaEventDestroy", [&](Lock&) {
    Event* const event = event_of(handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    machine().events.erase(event);
    delete event;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  return runtime_call("cudaEventRecord", [&](Lock&) {
    const auto stream = emulation::stream_of(stream_handle);
    Event* const event = event_of(handle);
    if (stream == nullptr || event == nullptr || stream->device != event->device) return cudaErrorInvalidResourceHandle;
    const auto record = std::make_shared<Record>();
    record->stream = stream;
    event->record = record;
    emulation::enqueue(stream, [record] {
      record->reached = true;
      record->time = std::chrono::steady_clock::now();
      return true;
    });
    record->position = stream->enqueued;
    return cudaSuccess;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return runtime_call("cudaEventSynchronize", [&](Lock& lock) {
    const Event* const event = event_of(handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    const int device = event->device;
    if (const std::shared_ptr<Record> record = event->record) {
      emulation::wait_until(lock, [&] { return emulation::advance(*record->stream, record->position); });
    }
    return after_waiting(device);
  });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return runtime_call("cudaEventQuery", [&](Lock&) {
    const Event* const event = event_of(handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    const std::shared_ptr<Record> record = event->record;
    if (record == nullptr || record->reached) return cudaSuccess;
    emulation::advance(*record->stream, record->stream->finished + 1);
    if (emulation::state_of(event->device) != cudaSuccess) return emulation::state_of(event->device);
    return record->reached ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  return runtime_call("cudaEventElapsedTime", [&](Lock&) {
    const Event* const start = event_of(start_handle);
    const Event* const end = event_of(end_handle);
    if (start == nullptr || end == nullptr || !start->timing || !end->timing) return cudaErrorInvalidResourceHandle;
    if (start->record == nullptr || end->record == nullptr) return cudaErrorInvalidResourceHandle;
    if (!start->record->reached || !end->record->reached) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(end->record->time - start->record->time).count();
    return cudaSuccess;
  });
}

}  // extern "C"
