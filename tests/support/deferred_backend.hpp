#pragma once
// A device without a device: the CPU's arithmetic behind a backend whose memory only it may touch and whose calls run
// as late as the contract allows, so that whoever forgets to wait reads 0xFF.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gradclip/backend/backend.hpp"

namespace gradclip::test {

class DeferredBackend final : public Backend {
 public:
  /// @param device_memory  bytes; more is Error(resources)
  explicit DeferredBackend(std::size_t device_memory = std::size_t{1} << 30) : limit_(device_memory) {}
  ~DeferredBackend() override;
  DeferredBackend(const DeferredBackend&) = delete;
  DeferredBackend& operator=(const DeferredBackend&) = delete;

  /// How a call fails.
  enum class Failure : std::uint8_t {
    once,     ///< this call and no other
    late,     ///< asynchronous: in the wait after it; other calls as once
    forever,  ///< this call and all after it, as a device that was lost
  };
  /// Makes the call with this number fail; the first one is 0.
  void fail_at(std::size_t call, Failure how) {
    failing_call_ = call;
    failure_ = how;
  }

  [[nodiscard]] BackendDescription describe() const override;
  [[nodiscard]] Buffer allocate(std::size_t bytes, MemorySpace space) override;
  void move(Bytes from, Bytes to) override;
  void wait(UnusedMemory unused) override;
  void statistics(const ChunkTable& table, const StatisticsRequest& request, Bytes out) override;
  void scale(const ChunkTable& table) override;
  void combine(std::span<const ChunkTable> addends, PartialOperation operation, double divisor, Bytes out) override;
  void accumulate(std::span<const Chunk> into, const ChunkTable& from, AccumulateStep step) override;

  /// Another amount of memory from now on.
  void set_device_memory(std::size_t bytes) { limit_ = bytes; }
  [[nodiscard]] std::size_t calls() const noexcept { return calls_; }
  [[nodiscard]] std::size_t uploaded() const noexcept { return uploaded_; }      ///< bytes moved to the device
  [[nodiscard]] std::size_t downloaded() const noexcept { return downloaded_; }  ///< bytes moved from the device
  [[nodiscard]] std::size_t device_bytes() const noexcept { return device_bytes_; }
  [[nodiscard]] std::size_t device_peak() const noexcept { return device_peak_; }
  [[nodiscard]] std::size_t pinned_bytes() const noexcept { return pinned_bytes_; }
  [[nodiscard]] std::size_t live_buffers() const noexcept { return live_buffers_; }
  [[nodiscard]] std::size_t releases() const noexcept { return releases_; }  ///< waits that gave unused memory back
  /// Broken promises: pending work that another thread's call or release met, or that was never waited for.
  [[nodiscard]] std::vector<std::string> violations() const;

 private:
  struct Range {
    const std::byte* begin = nullptr;
    std::size_t size = 0;
    bool written = false;
  };
  struct Operation {
    std::function<void()> run;
    std::vector<Range> touches;
    enum class Kind : std::uint8_t { call, allocation, release } kind = Kind::call;
  };
  class Table;

  /// Whether this is the late failure of an asynchronous call. Throws the others.
  bool count_call(bool asynchronous);
  void defer(Operation operation, bool fails);
  void finish_calls_of_this_thread();
  void release(Bytes bytes) noexcept;
  void check_against_others(const Operation& operation, const char* what);

  std::unique_ptr<Backend> real_ = make_backend(DeviceChoice::cpu).backend;
  std::atomic<std::size_t> limit_;
  std::atomic<std::size_t> failing_call_{std::numeric_limits<std::size_t>::max()};
  Failure failure_ = Failure::once;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::vector<Operation>> pending_;  ///< by thread
  std::map<std::byte*, Buffer> buffers_;
  std::vector<std::string> violations_;
  bool lost_ = false;
  std::atomic<std::size_t> calls_{0}, uploaded_{0}, downloaded_{0}, device_bytes_{0}, device_peak_{0}, pinned_bytes_{0},
      releases_{0}, live_buffers_{0};
};

}  // namespace gradclip::test
