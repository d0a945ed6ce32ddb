#pragma once
// How far a process is, for people who wait.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace gradclip {

/// A line on stderr that says how far this process is: a moving one on a terminal, a new one every 10 s elsewhere.
class Progress {
 public:
  enum class Mode : std::uint8_t { off, moving, lines };

  explicit Progress(Mode mode) : mode_(mode) {}
  ~Progress() { end(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void begin(double total_bytes);
  /// Thread-safe and cheap.
  void add(std::uint64_t bytes) noexcept;
  /// Takes the moving line away. Nothrow.
  void end() noexcept;

 private:
  void show(double seconds) noexcept;

  Mode mode_;
  double total_bytes_ = 0.0;
  std::atomic<std::uint64_t> done_bytes_{0};
  std::atomic<std::int64_t> next_milliseconds_{0};
  std::mutex mutex_;  // over what is on the screen
  bool on_screen_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace gradclip
