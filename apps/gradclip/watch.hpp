#pragma once
// A thread that ends the process in order when it is told to from outside, whatever the others are doing.

#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include "gradclip/comm/host_board.hpp"
#include "machine.hpp"

namespace gradclip {

/// SIGINT, SIGTERM and SIGHUP, a launcher that is gone, and a collective that takes longer than it may: what was
/// written so far is removed, one process of the host says why, and the process ends: of the signal, under a launcher
/// with 128 and the signal's number (which lets it end the others), else with ExitCode::resources.
class Watch {
 public:
  /// Starts to watch. Signals that are ignored stay so. Before any other thread is started: those inherit which signals
  /// are not theirs. @param board  outlives it  Errors: std::system_error if there can be no thread or descriptor.
  Watch(HostBoard& board, const Launch& launch);
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  /// The longest that this process may wait in a collective. Zero: for ever.
  void limit_waiting(std::chrono::seconds limit) noexcept { limit_ = limit; }

  /// Whether what this run has finished is kept when it is interrupted: the message says how to go on.
  void tell_how_to_resume(bool resumes) noexcept { resumes_ = resumes; }

  /// Does not return if the process is being ended: for the thread that works, whose errors follow from that.
  void give_way() noexcept {
    if (ending_) thread_.join();
  }

  /// From now on signals do what they do to any program: for a process that has said its last word. Nothrow.
  void stop() noexcept;

 private:
  void watch();
  void look_around();
  [[nodiscard]] std::string interrupted_by(int signal) const;
  [[noreturn]] void end(int signal, const std::string& message);

  HostBoard& board_;
  bool launched_;
  int parent_;
  sigset_t signals_{};
  int told_ = -1;  // readable: a signal
  int wake_ = -1;  // readable: stop
  std::atomic<bool> ending_{false};
  std::atomic<bool> resumes_{false};
  std::atomic<std::chrono::seconds> limit_{std::chrono::seconds(0)};
  std::thread thread_;
};

}  // namespace gradclip
