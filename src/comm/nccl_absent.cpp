#include "gradclip/comm/nccl_communicator.hpp"

namespace gradclip {

ChosenCommunicator try_nccl_communicator(Communicator&, const std::string&) {
  return {.communicator = nullptr, .reason = "this build has no NCCL"};
}

std::string nccl_library_version() {
  return "none";
}

}  // namespace gradclip
