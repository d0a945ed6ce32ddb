#include "watch.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/partial_output.hpp"
#include "output.hpp"

namespace gradclip {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
constexpr int kLookMilliseconds = 250;
/// A process that waits for the same one as others speaks later than those before it, which may have ended it by then.
constexpr std::chrono::milliseconds kStep{250};
/// How long a process that was signalled waits for the others, which may not have been, before it ends.
constexpr std::chrono::seconds kPatience{1};
constexpr std::chrono::milliseconds kLookForLeaving{5};

sigset_t signals_to_watch() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : kSignals) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) sigaddset(&signals, signal);
  }
  return signals;
}

std::string name_of(int signal) {
  return signal == SIGINT ? "SIGINT" : signal == SIGTERM ? "SIGTERM" : "SIGHUP";
}

}  // namespace

Watch::Watch(HostBoard& board, const Launch& launch)
    : board_(board),
      launched_(launch.launcher == Launcher::mpi),
      parent_(::getppid()),
      signals_(signals_to_watch()),
      told_(::signalfd(-1, &signals_, SFD_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC)) {
  if (told_ < 0 || wake_ < 0) throw std::system_error(errno, std::generic_category(), "cannot watch for signals");
  ::pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  thread_ = std::thread([this] { watch(); });
}

void Watch::stop() noexcept {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_, &one, sizeof one));
  thread_.join();
  ::close(std::exchange(told_, -1));
  ::close(std::exchange(wake_, -1));
  board_.leave();
  ::pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
}

void Watch::watch() {
  for (;;) {
    pollfd ready[] = {{wake_, POLLIN, 0}, {told_, POLLIN, 0}};
    const int count = ::poll(ready, 2, kLookMilliseconds);
    if (ready[0].revents != 0) break;
    signalfd_siginfo signal{};
    if (count > 0 && ::read(told_, &signal, sizeof signal) == sizeof signal) {
      const int number = static_cast<int>(signal.ssi_signo);
      const std::string missing = launched_ ? board_.who_does_not_run() : std::string();
      end(number, missing.empty() ? interrupted_by(number) : missing);
    }
    look_around();
  }
}

std::string Watch::interrupted_by(int signal) const {
  return "interrupted by " + name_of(signal) + (resumes_ ? "; run it again with --resume to continue" : "");
}

void Watch::look_around() {
  if (launched_ && ::getppid() != parent_) end(0, "the launcher of this run is gone");
  const std::chrono::seconds limit = limit_;
  const std::optional<std::chrono::nanoseconds> waited = board_.waiting();
  if (limit.count() == 0 || !waited || *waited < limit + kStep * board_.place()) return;
  const std::string missing = board_.who_does_not_run();
  end(0, fmt::format("the other processes: did not come to the next exchange within {} s (--timeout){}", limit.count(),
                     missing.empty() ? "" : "; " + missing));
}

void Watch::end(int signal, const std::string& message) {
  ending_ = true;
  // Told before anybody notices that the output is gone, and before a launcher loses its patience.
  const char* const line_start = ::isatty(STDERR_FILENO) == 1 ? "\r\033[K" : "";  // progress may stand there
  if (board_.claim_voice()) std::fprintf(stderr, "%sgradclip: error: %s\n", line_start, message.c_str());
  discard_unfinished_outputs();
  discard_unfinished_files();
  board_.leave();
  if (signal == 0) ::_exit(static_cast<int>(ExitCode::resources));
  if (launched_) {
    // Open MPI kills what is left of a run as soon as one of its processes has ended: while another one is removing the
    // output that all of them made.
    const auto patience_ends = std::chrono::steady_clock::now() + kPatience;
    while (!board_.all_have_left() && std::chrono::steady_clock::now() < patience_ends) {
      std::this_thread::sleep_for(kLookForLeaving);
    }
    ::_exit(128 + signal);
  }
  std::signal(signal, SIG_DFL);
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
  ::raise(signal);
  ::_exit(128 + signal);
}

}  // namespace gradclip
