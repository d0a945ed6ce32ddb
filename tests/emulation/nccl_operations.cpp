// Groups, messages and collectives of nccl.h. Every operation is a set of messages that progress together.

#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "nccl_call.hpp"
#include "nccl_communicator.hpp"
#include "nccl_reduction.hpp"

using emulation::Lock;
using emulation::nccl_call;
using emulation::nccl_failure;
using emulation::NcclCommunicator;
using emulation::Operation;
using emulation::Stream;
using emulation::Transfer;

namespace {

struct Issued {
  std::shared_ptr<NcclCommunicator> communicator;
  std::shared_ptr<Stream> stream;
  Operation operation;
};

/// The open group; a lone operation is a group of its own.
struct Group {
  int depth = 0;
  ncclResult_t failed = ncclSuccess;
  std::vector<Issued> issued;
};
Group group;

ncclResult_t end_group() {
  const Group ended = std::exchange(group, {});
  if (ended.failed != ncclSuccess) return ended.failed;
  ncclResult_t result = ncclSuccess;
  for (const Issued& issued : ended.issued) {
    issued.communicator->issue(issued.stream, issued.operation);
    if (!issued.communicator->blocking()) result = ncclInProgress;
  }
  return result;
}

/// What an operation was asked to do it with, checked.
struct Place {
  ncclResult_t error = ncclSuccess;
  std::shared_ptr<NcclCommunicator> communicator;
  std::shared_ptr<Stream> stream;
};

Place place_for(ncclComm_t comm, cudaStream_t handle) {
  if (comm == nullptr) return {nccl_failure(ncclInvalidArgument, "comm argument is NULL"), {}, {}};
  const auto& communicator = comm->communicator;
  if (!communicator->is_ready()) {
    return {nccl_failure(ncclInvalidArgument,
                         "Attempt to use communicator before the previous operation returned ncclSuccess"),
            {},
            {}};
  }
  const auto stream = emulation::stream_of(handle);
  if (stream == nullptr || stream->device != communicator->device() ||
      emulation::state_of(communicator->device()) != cudaSuccess) {
    return {nccl_failure(ncclUnhandledCudaError, "Cuda failure: the stream or the device cannot be used"), {}, {}};
  }
  return {ncclSuccess, communicator, stream};
}

bool on_device(const void* buffer, std::size_t bytes, int device) {
  if (bytes == 0) return true;
  const emulation::Range range = emulation::range_of(buffer, bytes);
  return range.space == emulation::Space::device && range.whole && range.device == device;
}

Transfer transfer(bool is_send, int peer, int tag, const void* buffer, std::size_t bytes) {
  auto* const address = static_cast<std::byte*>(const_cast<void*>(buffer));
  return {is_send, peer, tag, address, bytes, {}};
}

/// Adds to the open group what `build` makes of a checked place.
/// @param build  Operation(NcclCommunicator&)
template <class Build>
ncclResult_t add(ncclComm_t comm, cudaStream_t handle, const void* send, std::size_t send_bytes, const void* receive,
                 std::size_t receive_bytes, int peer, Build&& build) {
  const Place place = place_for(comm, handle);
  ncclResult_t error = place.error;
  if (error == ncclSuccess && (peer < 0 || peer >= place.communicator->size())) {
    error = nccl_failure(ncclInvalidArgument, "Invalid peer or root");
  }
  if (error == ncclSuccess && !(on_device(send, send_bytes, place.communicator->device()) &&
                                on_device(receive, receive_bytes, place.communicator->device()))) {
    error = nccl_failure(ncclInvalidArgument, "a buffer is not memory of the communicator's device");
  }
  if (error != ncclSuccess) {
    group.failed = error;
    if (group.depth == 0) group = {};
    return error;
  }
  Operation operation = build(*place.communicator);
  const auto same = std::find_if(group.issued.begin(), group.issued.end(), [&](const Issued& issued) {
    return issued.communicator == place.communicator && issued.stream == place.stream && !issued.operation.finish &&
           !operation.finish;
  });
  if (same == group.issued.end()) {
    group.issued.push_back({place.communicator, place.stream, std::move(operation)});
  } else {
    std::move(operation.transfers.begin(), operation.transfers.end(), std::back_inserter(same->operation.transfers));
  }
  return group.depth == 0 ? end_group() : ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGroupStart() {
  return nccl_call("ncclGroupStart", [](Lock&) {
    ++group.depth;
    return ncclSuccess;
  });
}

ncclResult_t ncclGroupEnd() {
  const ncclResult_t result = nccl_call("ncclGroupEnd", [](Lock&) {
    if (group.depth == 0) return nccl_failure(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    return --group.depth == 0 ? end_group() : ncclSuccess;
  });
  if (result != ncclSuccess && result != ncclInProgress) group = {};
  return result;
}

ncclResult_t ncclSend(const void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return nccl_call("ncclSend", [&](Lock&) {
    const std::size_t bytes = count * emulation::size_of(type);
    return add(comm, stream, buffer, bytes, nullptr, 0, peer, [&](NcclCommunicator& communicator) {
      return Operation{{transfer(true, peer, communicator.next_send_tag(peer), buffer, bytes)}, {}};
    });
  });
}

ncclResult_t ncclRecv(void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return nccl_call("ncclRecv", [&](Lock&) {
    const std::size_t bytes = count * emulation::size_of(type);
    return add(comm, stream, nullptr, 0, buffer, bytes, peer, [&](NcclCommunicator& communicator) {
      return Operation{{transfer(false, peer, communicator.next_receive_tag(peer), buffer, bytes)}, {}};
    });
  });
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return nccl_call("ncclAllGather", [&](Lock&) {
    const std::size_t bytes = count * emulation::size_of(type);
    const std::size_t all = comm == nullptr ? 0 : bytes * static_cast<std::size_t>(comm->communicator->size());
    return add(comm, stream, send, bytes, receive, all, 0, [&](NcclCommunicator& communicator) {
      Operation operation;
      const int tag = communicator.next_collective_tag();
      for (int peer = 0; peer < communicator.size(); ++peer) {
        auto* const part = static_cast<std::byte*>(receive) + static_cast<std::size_t>(peer) * bytes;
        operation.transfers.push_back(transfer(true, peer, tag, send, bytes));
        operation.transfers.push_back(transfer(false, peer, tag, part, bytes));
      }
      return operation;
    });
  });
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return nccl_call("ncclBroadcast", [&](Lock&) {
    const std::size_t bytes = count * emulation::size_of(type);
    const bool is_root = comm != nullptr && comm->communicator->rank() == root;
    return add(comm, stream, send, is_root ? bytes : 0, receive, bytes, root, [&](NcclCommunicator& communicator) {
      Operation operation;
      const int tag = communicator.next_collective_tag();
      for (int peer = 0; is_root && peer < communicator.size(); ++peer) {
        operation.transfers.push_back(transfer(true, peer, tag, send, bytes));
      }
      operation.transfers.push_back(transfer(false, root, tag, receive, bytes));
      return operation;
    });
  });
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                           ncclComm_t comm, cudaStream_t stream) {
  return nccl_call("ncclAllReduce", [&](Lock&) {
    if (!emulation::can_reduce(type, reduction)) {
      return nccl_failure(ncclInvalidArgument, "this reduction of this type is not emulated");
    }
    const std::size_t bytes = count * emulation::size_of(type);
    return add(comm, stream, send, bytes, receive, bytes, 0, [&](NcclCommunicator& communicator) {
      Operation operation;
      const int tag = communicator.next_collective_tag();
      for (int peer = 0; peer < communicator.size(); ++peer) {
        operation.transfers.push_back(transfer(true, peer, tag, send, bytes));
        operation.transfers.push_back(transfer(false, peer, tag, nullptr, bytes));
      }
      operation.finish = [=](const std::vector<Transfer>& transfers) {
        std::vector<std::byte> result;
        for (const Transfer& part : transfers) {  // in the order of ranks
          if (part.is_send) continue;
          if (result.empty()) {
            result = part.staged;
          } else {
            emulation::reduce_into(result.data(), part.staged.data(), count, type, reduction);
          }
        }
        if (bytes != 0) std::memcpy(receive, result.data(), bytes);
      };
      return operation;
    });
  });
}

}  // extern "C"
