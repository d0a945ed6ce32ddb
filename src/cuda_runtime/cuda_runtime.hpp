#pragma once
// Owners of CUDA's handles and the one check of its calls. Every asynchronous call takes its stream.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <source_location>
#include <string>
#include <utility>

namespace gradclip::cuda {

/// @throws Error resources with CUDA's name and text of the failure, what was called, and advice; the runtime's own
/// memory of the failure is cleared.
void check(cudaError_t status, const char* call, std::source_location where = std::source_location::current());

#define GRADCLIP_CUDA(call) ::gradclip::cuda::check((call), #call)

/// For destructors: a failure is cleared and forgotten, because whoever waits on the device meets it again.
void check_quietly(cudaError_t status) noexcept;

/// A stream of the calling thread's current device, without implicit order with the default stream.
class Stream {
 public:
  Stream();
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }
  /// Returns when everything in the stream is done.
  void wait() const { GRADCLIP_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A point in a stream's work, without timing.
class Event {
 public:
  Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();

  /// The point after everything that the stream has been given so far.
  void record(cudaStream_t stream) const { GRADCLIP_CUDA(cudaEventRecord(event_, stream)); }
  /// Returns when the recorded point is passed; at once if none was recorded.
  void wait() const { GRADCLIP_CUDA(cudaEventSynchronize(event_)); }
  /// What the stream is given from now on begins after the recorded point.
  void hold_back(cudaStream_t stream) const { GRADCLIP_CUDA(cudaStreamWaitEvent(stream, event_, 0)); }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Host memory that devices copy from and to asynchronously.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(std::size_t bytes);
  PinnedMemory(PinnedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory();

  [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// The devices that this process can use, or why there is none. A machine without a driver or device is an answer;
/// anything else that goes wrong is Error(resources).
struct Devices {
  int count = 0;
  std::string why_none;  ///< "no NVIDIA driver is installed", "the driver is too old ...", "no CUDA device"
};
[[nodiscard]] Devices usable_devices();

/// Makes a device the calling thread's current one. Cheap where it is already.
void use_device(int device);

/// "13.0".
[[nodiscard]] std::string version_text(int version);

}  // namespace gradclip::cuda
