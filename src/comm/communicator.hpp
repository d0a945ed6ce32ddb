#pragma once
// Seam 2: the running processes of one gradclip run. Bytes here; typed helpers are the free templates below.
//
// Processes are the program's own (mpirun -np N); the recorded job's ranks are called recorded ranks everywhere.

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/base/memory.hpp"

namespace gradclip {

struct CommunicatorDescription {
  std::string name;    ///< "single", "mpi", "nccl"
  std::string detail;  ///< library and version
  int processes_on_this_host = 1;
  bool device_memory = false;  ///< whether collectives take MemorySpace::device
};

/// What the processes agreed on after one of them failed.
struct Agreement {
  ExitCode code;
  bool speaks;  ///< whether this process is the one that prints its message
};

/// Thrown in the processes whose peer failed: the peer prints its message, this process unwinds and ends with `code`.
struct PeerFailed {
  ExitCode code;
};

/// Collectives that every process calls in the same order. A process that fails calls abort() instead of its next
/// collective; the others learn of it there (PeerFailed), so that all end with one code and one message.
/// No reduction is offered: sums of floating-point numbers are ours, in a fixed order.
///
/// Bytes are complete when a collective is called (a backend that writes them was waited for) and when it returns. Host
/// and pinned memory go everywhere; device memory only where describe() says so, and then every process names it for
/// everything it gives to the call, bytes of size 0 too.
class Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int process() const noexcept = 0;  ///< 0 ... size() - 1
  [[nodiscard]] virtual int size() const noexcept = 0;
  [[nodiscard]] virtual CommunicatorDescription describe() const = 0;

  /// Copies process `root`'s bytes to all. @pre the same size everywhere.
  virtual void broadcast(Bytes bytes, int root) = 0;

  /// Every process's bytes, one after another in process order; sizes may differ and be 0.
  /// @param counts  bytes of each process, size() entries, the same everywhere.
  virtual void all_gather(Bytes mine, std::span<const std::size_t> counts, Bytes all) = 0;

  /// Sends send_counts[i] bytes (laid one after another) to process i and receives receive_counts[i] from it.
  virtual void all_to_all(Bytes send, std::span<const std::size_t> send_counts, Bytes receive,
                          std::span<const std::size_t> receive_counts) = 0;

  virtual void barrier() = 0;

  /// Called once, by a process that cannot go on, in place of its next collective. Waits a few seconds for the others
  /// to reach theirs; if they do, all agree on the gravest code and on one speaker, and abort returns. If they do not,
  /// prints `message` to stderr and ends all processes.
  virtual Agreement abort(ExitCode code, const std::string& message) = 0;
};

/// The communicator of a run that no launcher started.
[[nodiscard]] std::unique_ptr<Communicator> make_single_process_communicator();

// ---------------------------------------------------------------------------------------------------------------------
// Typed helpers for trivially copyable values in host memory
// ---------------------------------------------------------------------------------------------------------------------

template <class T>
[[nodiscard]] Bytes bytes_of(std::span<T> values) {
  static_assert(std::is_trivially_copyable_v<std::remove_const_t<T>>);
  return {reinterpret_cast<std::byte*>(const_cast<std::remove_const_t<T>*>(values.data())), values.size_bytes(),
          MemorySpace::host};
}

/// One value of every process, in process order.
template <class T>
[[nodiscard]] std::vector<T> gather_value(Communicator& comm, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(comm.size()));
  const std::vector<std::size_t> counts(all.size(), sizeof(T));
  comm.all_gather(bytes_of(std::span<const T>(&mine, 1)), counts, bytes_of(std::span<T>(all)));
  return all;
}

/// All processes' values one after another in process order; every process gets them all.
template <class T>
[[nodiscard]] std::vector<T> gather_values(Communicator& comm, std::span<const T> mine) {
  std::vector<std::size_t> counts = gather_value(comm, mine.size_bytes());
  std::size_t total = 0;
  for (const std::size_t count : counts) total += count;
  std::vector<T> all(total / sizeof(T));
  comm.all_gather(bytes_of(mine), counts, bytes_of(std::span<T>(all)));
  return all;
}

/// Sends the values, counts[i] of them to process i in the order of processes; returns what the processes sent here,
/// one after another in process order.
/// @param received  if given: how many values came from each process
template <class T>
[[nodiscard]] std::vector<T> exchange_values(Communicator& comm, std::vector<T> outgoing,
                                             std::span<const std::size_t> counts,
                                             std::vector<std::size_t>* received = nullptr) {
  const auto processes = static_cast<std::size_t>(comm.size());
  std::vector<std::size_t> send_counts(counts.begin(), counts.end()), receive_counts(processes);
  for (std::size_t& count : send_counts) count *= sizeof(T);
  const std::vector<std::size_t> eight(processes, sizeof(std::size_t));
  comm.all_to_all(bytes_of(std::span<const std::size_t>(send_counts)), eight,
                  bytes_of(std::span<std::size_t>(receive_counts)), eight);
  std::size_t total = 0;
  for (const std::size_t count : receive_counts) total += count;
  std::vector<T> incoming(total / sizeof(T));
  comm.all_to_all(bytes_of(std::span<const T>(outgoing)), send_counts, bytes_of(std::span<T>(incoming)),
                  receive_counts);
  if (received != nullptr) {
    for (std::size_t& count : receive_counts) count /= sizeof(T);
    *received = std::move(receive_counts);
  }
  return incoming;
}

/// Sends outgoing[i] to process i; returns what each process sent here, by process.
template <class T>
[[nodiscard]] std::vector<std::vector<T>> exchange_values(Communicator& comm, std::vector<std::vector<T>> outgoing) {
  std::vector<std::size_t> counts, received;
  std::vector<T> send;
  for (std::vector<T>& to : outgoing) {
    counts.push_back(to.size());
    send.insert(send.end(), to.begin(), to.end());
    std::vector<T>().swap(to);  // rounds are sized by memory
  }
  const std::vector<T> all = exchange_values(comm, std::move(send), counts, &received);
  std::vector<std::vector<T>> incoming;
  auto next = all.begin();
  for (const std::size_t count : received) {
    incoming.emplace_back(next, next + static_cast<std::ptrdiff_t>(count));
    next += static_cast<std::ptrdiff_t>(count);
  }
  return incoming;
}

/// A string of process `root`, for all.
[[nodiscard]] std::string broadcast_string(Communicator& comm, std::string text, int root);

}  // namespace gradclip
