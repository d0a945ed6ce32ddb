#include "stream.hpp"

#include <algorithm>
#include <thread>
#include <vector>

#include "machine.hpp"
#include "settings.hpp"

namespace emulation {
namespace {

constexpr std::chrono::microseconds kPause{50};

std::vector<std::shared_ptr<Stream>> all_streams() {
  std::vector<std::shared_ptr<Stream>> all;
  for (const Device& device : machine().devices) all.push_back(device.null_stream);
  for (const auto& [handle, stream] : machine().streams) all.push_back(stream);
  for (const auto& stream : machine().orphans) all.push_back(stream);
  return all;
}

void append(Stream& stream, Work work) {
  stream.queue.push_back(std::move(work));
  ++stream.enqueued;
}

/// Work after it in `stream` starts when `other` has finished what it has now.
void order_after(Stream& stream, const std::shared_ptr<Stream>& other) {
  if (other->idle()) return;
  append(stream, [other, position = other->enqueued] { return advance(*other, position); });
}

}  // namespace

std::shared_ptr<Stream> stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return machine().devices[static_cast<std::size_t>(current_device())].null_stream;
  }
  const auto found = machine().streams.find(handle);
  return found == machine().streams.end() ? nullptr : found->second;
}

void enqueue(const std::shared_ptr<Stream>& stream, Work work) {
  const std::shared_ptr<Stream>& null_stream = machine().devices[static_cast<std::size_t>(stream->device)].null_stream;
  if (stream == null_stream) {
    for (const auto& [handle, other] : machine().streams) {
      if (other->waits_for_null && other->device == stream->device) order_after(*stream, other);
    }
  } else if (stream->waits_for_null) {
    order_after(*stream, null_stream);
  }
  append(*stream, std::move(work));
  if (settings().eager) advance(*stream, stream->enqueued);
}

bool advance(Stream& stream, std::uint64_t position) {
  if (stream.finished >= position) return true;
  if (stream.running) return false;
  const Opened opened(machine().arena);
  const Device& device = machine().devices[static_cast<std::size_t>(stream.device)];
  stream.running = true;
  while (stream.finished < position) {
    // A broken device does nothing more; who waits for it learns so.
    if (device.broken == cudaSuccess && !stream.queue.front()()) break;
    stream.queue.pop_front();
    ++stream.finished;
  }
  stream.running = false;
  return stream.finished >= position;
}

void advance_all() {
  for (const auto& stream : all_streams()) {
    if (!stream->idle()) advance(*stream, stream->finished + 1);
  }
  std::erase_if(machine().orphans, [](const auto& stream) { return stream->idle(); });
}

void wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached) {
  while (!reached()) {
    advance_all();
    if (reached()) return;
    lock.unlock();
    std::this_thread::sleep_for(kPause);
    lock.lock();
  }
}

void wait_for_device(std::unique_lock<std::mutex>& lock, int device) {
  for (const auto& stream : all_streams()) {
    if (stream->device != device) continue;
    const std::uint64_t position = stream->enqueued;
    wait_until(lock, [&] { return advance(*stream, position); });
  }
  std::erase_if(machine().orphans, [](const auto& stream) { return stream->idle(); });
}

}  // namespace emulation
