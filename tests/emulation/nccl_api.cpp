// The functions of nccl.h, except the operations (nccl_operations.cpp).

#include <nccl.h>

#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "ledger.hpp"
#include "nccl_call.hpp"
#include "nccl_communicator.hpp"
#include "settings.hpp"

using emulation::Lock;
using emulation::nccl_call;
using emulation::nccl_failure;
using emulation::NcclCommunicator;

namespace {

ncclResult_t wait_unless_nonblocking(Lock& lock, NcclCommunicator& communicator) {
  if (!communicator.blocking()) return ncclInProgress;
  ncclResult_t result = ncclInProgress;
  emulation::wait_until(lock, [&] { return (result = communicator.progress()) != ncclInProgress; });
  return result;
}

ncclResult_t connect(Lock& lock, ncclComm_t* handle, int size, const ncclUniqueId& id, int rank, bool blocking) {
  *handle = nullptr;
  if (emulation::settings().driver != emulation::Driver::present) {
    return nccl_failure(ncclUnhandledCudaError, "Cuda failure: no device");
  }
  if (size < 1 || rank < 0 || rank >= size) return nccl_failure(ncclInvalidArgument, "Invalid rank requested");
  int processes = 1, initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized != 0) MPI_Comm_size(MPI_COMM_WORLD, &processes);
  if (size != 1 && size != processes) {
    return nccl_failure(ncclInvalidUsage, "only communicators of one process or of all are emulated");
  }
  auto communicator = std::make_shared<NcclCommunicator>(size, rank, emulation::current_device(), blocking);
  communicator->connect(id);
  const ncclResult_t result = wait_unless_nonblocking(lock, *communicator);
  if (result == ncclSuccess || result == ncclInProgress) *handle = new ncclComm{std::move(communicator)};
  return result;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  return nccl_call("ncclGetVersion", [&](Lock&) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
  });
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return nccl_call("ncclGetUniqueId", [&](Lock&) {
    std::random_device random;
    for (char& byte : id->internal) byte = static_cast<char>(random());
    return ncclSuccess;
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return nccl_call("ncclCommInitRank", [&](Lock& lock) { return connect(lock, comm, size, id, rank, true); });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return nccl_call("ncclCommInitRankConfig", [&](Lock& lock) {
    const ncclConfig_t usual = NCCL_CONFIG_INITIALIZER;
    if (config != nullptr && config->magic != usual.magic) {
      return nccl_failure(ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    }
    return connect(lock, comm, size, id, rank, config == nullptr || config->blocking != 0);
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return nccl_call("ncclCommFinalize", [&](Lock& lock) {
    if (comm == nullptr) return ncclInvalidArgument;
    comm->communicator->finalize();
    return wait_unless_nonblocking(lock, *comm->communicator);
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return nccl_call("ncclCommDestroy", [&](Lock&) {
    if (comm == nullptr) return ncclSuccess;
    comm->communicator->let_go();
    delete comm;  // what is still in a stream keeps the communicator
    return ncclSuccess;
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return nccl_call("ncclCommAbort", [&](Lock&) {
    if (comm == nullptr) return ncclSuccess;
    comm->communicator->abort();
    comm->communicator->let_go();
    delete comm;
    return ncclSuccess;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return nccl_call("ncclCommGetAsyncError", [&](Lock&) {
    if (comm == nullptr) return ncclInvalidArgument;
    if (const auto failure = emulation::count_call("ncclAsync", ncclRemoteError)) {
      comm->communicator->fail(static_cast<ncclResult_t>(*failure));
    }
    *error = comm->communicator->progress();
    return ncclSuccess;
  });
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  return nccl_call("ncclCommCount", [&](Lock&) {
    *count = comm->communicator->size();
    return ncclSuccess;
  });
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  return nccl_call("ncclCommUserRank", [&](Lock&) {
    *rank = comm->communicator->rank();
    return ncclSuccess;
  });
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  return nccl_call("ncclCommCuDevice", [&](Lock&) {
    *device = comm->communicator->device();
    return ncclSuccess;
  });
}

const char* ncclGetLastError(ncclComm_t) {
  return emulation::last_nccl_failure().c_str();
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

}  // extern "C"
