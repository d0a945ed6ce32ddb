#pragma once
// The messages of one operation while they are under way.

#include <mpi.h>

#include <memory>
#include <vector>

#include "nccl_communicator.hpp"

namespace emulation {

/// One step of a stream (stream.hpp). All messages progress together: a group cannot lock itself.
class Exchange {
 public:
  Exchange(std::shared_ptr<NcclCommunicator> communicator, Operation operation, bool hangs);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Posts the messages when called first. @return whether all are through.
  bool step();

 private:
  struct Request {
    MPI_Request handle;
    const Transfer* transfer;
    std::size_t bytes;
  };
  void post(Transfer& transfer);
  [[nodiscard]] bool through();
  bool take_from_self(Transfer& transfer);
  void deliver();

  std::shared_ptr<NcclCommunicator> communicator_;
  Operation operation_;
  bool hangs_;
  bool posted_ = false;
  std::vector<Request> requests_;
  std::vector<Transfer*> from_self_;
};

void check_mpi(int status);

}  // namespace emulation
