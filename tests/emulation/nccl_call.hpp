#pragma once
// The way into every function of NCCL's API.

#include <nccl.h>

#include <memory>
#include <string>

#include "ledger.hpp"
#include "nccl_communicator.hpp"
#include "runtime_call.hpp"

/// What nccl.h's handle points to.
struct ncclComm {  // NOLINT(readability-identifier-naming)
  std::shared_ptr<emulation::NcclCommunicator> communicator;
};

namespace emulation {

/// @param body  ncclResult_t(Lock&), called with the machine locked.
template <class Body>
ncclResult_t nccl_call(const char* name, Body&& body) {
  Lock lock(machine().mutex);
  const auto failure = count_call(name, ncclSystemError);
  if (failure) return nccl_failure(static_cast<ncclResult_t>(*failure), std::string(name) + ": asked to fail");
  return body(lock);
}

}  // namespace emulation
