#pragma once
// Collectives on device memory, where every process has a GPU of its own.

#include <memory>
#include <string>

#include "gradclip/comm/communicator.hpp"

namespace gradclip {

struct ChosenCommunicator {
  std::unique_ptr<Communicator> communicator;  ///< empty: the base goes on alone
  std::string reason;                          ///< one sentence: why this one
};

/// A communicator that takes device bytes through NCCL and leaves everything else to `base`; or an empty pointer and
/// the reason: a build without NCCL (nccl_absent.cpp is then linked in the real one's place), one process, a process
/// without a device, two processes on one device. Collective over `base`, and the same answer in every process.
///
/// Each of its collectives on device memory begins with the base's agreement, so that a peer that failed is PeerFailed
/// here too. Bytes travel as bytes, by sends and receives; NCCL never reduces anything.
///
/// Nothing of NCCL is waited for without end. Setting up and each collective are polled for at most 10 minutes, or for
/// the whole seconds from 1 to 86,400 that the environment variable GRADCLIP_NCCL_TIMEOUT names. A NCCL that is there
/// and fails is an Error and never a reason to take the slower road: that would hide a broken machine.
/// Errors: Error(resources) where NCCL fails or does not end in time, after it was aborted: such a communicator only
/// serves host memory, barrier and abort from then on. Error(usage) for a GRADCLIP_NCCL_TIMEOUT that is no such number.
///
/// @param base             outlives the result; serves host memory, errors and agreement
/// @param device_identity  BackendDescription::identity of this process; its device is the calling thread's current one
[[nodiscard]] ChosenCommunicator try_nccl_communicator(Communicator& base, const std::string& device_identity);

/// "NCCL 2.28.9", or "none".
[[nodiscard]] std::string nccl_library_version();

}  // namespace gradclip
