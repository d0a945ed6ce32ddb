#pragma once
// A communicator of the emulated NCCL: its life, and its operations that the device has not finished.

#include <mpi.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "machine.hpp"

namespace emulation {

/// One message of an operation. Bytes go through host memory, so that MPI never touches that of a device.
struct Transfer {
  bool is_send = true;
  int peer = 0;
  int tag = 0;
  std::byte* address = nullptr;  ///< in device memory; null: into or out of `staged` only
  std::size_t bytes = 0;
  std::vector<std::byte> staged;
};

/// What one communicator does in one stream in one group.
struct Operation {
  std::vector<Transfer> transfers;
  /// Called when all are through; may be empty.
  std::function<void(const std::vector<Transfer>&)> finish;
};

class NcclCommunicator : public std::enable_shared_from_this<NcclCommunicator> {
 public:
  NcclCommunicator(int size, int rank, int device, bool blocking);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] bool blocking() const noexcept { return blocking_; }

  /// Begins to find the peers. They must have been given the same id, and a device each.
  void connect(const ncclUniqueId& id);

  /// Brings on what is under way. @return ncclInProgress, ncclSuccess, or what failed.
  ncclResult_t progress();

  /// Whether state() was last ncclSuccess, as it must be before the next operation.
  [[nodiscard]] bool is_ready() const noexcept { return phase_ == Phase::ready && deferred_.empty(); }

  /// Tags in the order of issue, so that a message finds its partner whichever stream comes first.
  int next_send_tag(int peer) { return 2 * wrapped(sends_[static_cast<std::size_t>(peer)]++); }
  int next_receive_tag(int peer) { return 2 * wrapped(receives_[static_cast<std::size_t>(peer)]++); }
  int next_collective_tag() { return 2 * wrapped(collectives_++) + 1; }

  /// Hands an operation to the stream: at once, or as that of a nonblocking communicator when progress() is asked.
  void issue(const std::shared_ptr<Stream>& stream, Operation operation);

  void finalize();
  void abort();
  /// The handle is gone. What MPI is still about to write to stays.
  void let_go();
  [[nodiscard]] bool aborted() const noexcept { return aborted_; }
  void fail(ncclResult_t error) { failed_ = error; }

 private:
  friend class Exchange;
  enum class Phase { duplicating, gathering, ready, finalizing, finalized };
  /// What a process says of itself when it connects.
  struct Member {
    std::uint64_t id;
    std::uint64_t host;
    int rank;
    int device;
  };

  static int wrapped(std::uint64_t count) { return static_cast<int>(count % (1u << 20)); }
  ncclResult_t check_members();
  void release_deferred();

  const int size_;
  const int rank_;
  const int device_;
  const bool blocking_;
  Phase phase_ = Phase::ready;
  bool aborted_ = false;
  bool hangs_ = false;
  std::optional<ncclResult_t> failed_;
  MPI_Comm mpi_ = MPI_COMM_NULL;
  MPI_Request request_ = MPI_REQUEST_NULL;
  Member self_{};
  std::vector<Member> members_;
  std::vector<std::uint64_t> sends_, receives_;
  std::uint64_t collectives_ = 0;
  std::map<int, std::vector<std::byte>> to_self_;  ///< by tag
  std::size_t unfinished_ = 0;                     ///< operations in streams
  std::vector<std::pair<std::shared_ptr<Stream>, Operation>> deferred_;
  bool asked_ = false;  ///< since something was deferred
};

/// Remembers the sentence that ncclGetLastError returns.
ncclResult_t nccl_failure(ncclResult_t error, const std::string& text);
const std::string& last_nccl_failure();

}  // namespace emulation
