#pragma once
// What the processes of a run on one host can tell each other at any time, without a collective: for a thread that
// watches while another one works or waits.

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace gradclip {

/// Plain words in memory that the processes share; zeros at first.
struct HostBoardMemory {
  static constexpr std::size_t kMostProcesses = 1024;  ///< further ones are not told of

  std::atomic<std::uint32_t> voice;  // of HostBoard::Voice
  struct Place {
    std::atomic<std::int32_t> id;  ///< of the operating system; 0: none, or it has left in order
    std::atomic<std::int32_t> process;
  };
  std::array<Place, kMostProcesses> places;
};

class HostBoard {
 public:
  HostBoard() = default;
  HostBoard(const HostBoard&) = delete;
  HostBoard& operator=(const HostBoard&) = delete;

  /// From now on the memory is the host's. @param memory  outlives the board  @param place  of this process among those
  /// of the host
  void share(HostBoardMemory& memory, int place, int process) noexcept;

  /// The memory is about to go; what was said there is remembered. Nobody else uses the board by now.
  void unshare() noexcept;

  /// True for the one process of the host that asks first, unless all have agreed on one: it tells why the run ends,
  /// the others keep quiet.
  [[nodiscard]] bool claim_voice() noexcept;
  /// The processes have agreed on who tells why the run ends. False if another one has told already.
  bool agree_on_voice() noexcept;

  /// This process is about to leave: nobody is to miss it.
  void leave() noexcept;

  /// Whether nobody of the host is to be missed any more: all have left, or do not run.
  [[nodiscard]] bool all_have_left() const;

  /// "process 2 (pid 4711) is stopped", of a process that does not run; empty if all do, as far as can be seen.
  [[nodiscard]] std::string who_does_not_run() const;

  /// Of a collective, by the thread that calls it: begins now, or is over.
  void note_waiting(bool waiting) noexcept;
  /// How long this process has been in the collective that it is in. Empty: in none.
  [[nodiscard]] std::optional<std::chrono::nanoseconds> waiting() const noexcept;

  /// This process among those of the host, 0 first.
  [[nodiscard]] int place() const noexcept { return place_.load(); }

 private:
  enum Voice : std::uint32_t { silent, agreed, claimed };

  [[nodiscard]] HostBoardMemory& memory() const noexcept { return *memory_.load(); }

  HostBoardMemory own_{};
  std::atomic<HostBoardMemory*> memory_{&own_};
  std::atomic<int> place_{0};
  std::atomic<std::int64_t> waiting_since_{0};  // 0: not
};

}  // namespace gradclip
