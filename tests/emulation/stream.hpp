#pragma once
// Streams and events. Work runs as late as the API allows: when the host waits or asks, or memory runs out.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace emulation {

/// One step of a stream: true when it is complete, else it is called again later.
using Work = std::function<bool()>;

struct Stream {
  int device = 0;
  bool waits_for_null = false;  ///< created without cudaStreamNonBlocking
  std::deque<Work> queue;
  std::uint64_t enqueued = 0;
  std::uint64_t finished = 0;
  bool running = false;

  [[nodiscard]] bool idle() const { return finished == enqueued; }
};

/// The place in a stream at which an event was recorded.
struct Record {
  std::shared_ptr<Stream> stream;
  std::uint64_t position = 0;
  bool reached = false;
  std::chrono::steady_clock::time_point time;
};

struct Event {
  int device = 0;
  bool timing = true;
  std::shared_ptr<Record> record;  ///< null: never recorded
};

/// The stream of a handle as the calling thread's device sees it; null if there is none.
std::shared_ptr<Stream> stream_of(cudaStream_t handle);

void enqueue(const std::shared_ptr<Stream>& stream, Work work);

/// Runs the stream's work in order up to a position. @return whether it was reached.
bool advance(Stream& stream, std::uint64_t position);

/// One step of every stream: what devices do while the host waits.
void advance_all();

/// Waits until `reached()`, letting go of the lock between tries.
void wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached);

/// Waits for all streams of a device.
void wait_for_device(std::unique_lock<std::mutex>& lock, int device);

}  // namespace emulation
