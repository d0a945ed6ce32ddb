#pragma once
// Communicators for the tests of the emulated NCCL.

#include <gtest/gtest.h>
#include <nccl.h>

#include <chrono>
#include <span>
#include <thread>

#include "gradclip/comm/communicator.hpp"
#include "mpi_environment.hpp"

namespace emulation::test {

/// Process 0's id, in all processes.
inline ncclUniqueId shared_id() {
  ncclUniqueId id{};
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  gradclip::test::world().broadcast({reinterpret_cast<std::byte*>(&id), sizeof id, gradclip::MemorySpace::host}, 0);
  return id;
}

inline ncclComm_t connected() {
  ncclComm_t comm = nullptr;
  const gradclip::Communicator& world = gradclip::test::world();
  EXPECT_EQ(ncclCommInitRank(&comm, world.size(), shared_id(), world.process()), ncclSuccess);
  return comm;
}

/// Asks until the answer is no longer ncclInProgress.
inline ncclResult_t settled(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (true) {
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    if (state != ncclInProgress) return state;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace emulation::test
