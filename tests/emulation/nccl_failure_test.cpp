// An emulated NCCL that hangs, and one that reports a lost peer.

#include <gtest/gtest.h>
#include <nccl.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "nccl_test_support.hpp"
#include "test_kernels.hpp"

namespace emulation::test {
namespace {

// Before the first call reads them. The second group hangs.
const bool kEnvironment = setenv("GRADCLIP_EMULATION_DEVICES", "3", 1) == 0 &&
                          setenv("GRADCLIP_EMULATION_FAIL", "ncclHang:2,ncclAsync:3,ncclSend:4", 1) == 0;

TEST(NcclFailures, HangUntilAborted) {
  ASSERT_TRUE(kEnvironment);
  const int rank = gradclip::test::world().process();
  const int size = gradclip::test::world().size();
  expect_success(cudaSetDevice(rank));
  cudaStream_t stream = new_stream();
  auto* const value = device_array<int>(2);
  const auto exchange = [&](ncclComm_t comm) {
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    EXPECT_EQ(ncclSend(value, 1, ncclInt32, (rank + 1) % size, comm, stream), ncclSuccess);
    EXPECT_EQ(ncclRecv(value + 1, 1, ncclInt32, (rank + size - 1) % size, comm, stream), ncclSuccess);
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  };
  expect_success(cudaMemcpy(value, &rank, sizeof rank, cudaMemcpyHostToDevice));
  ncclComm_t comm = connected();
  exchange(comm);
  expect_success(cudaStreamSynchronize(stream));
  EXPECT_EQ(read_back(value, 2)[1], (rank + size - 1) % size);

  expect_success(cudaMemsetAsync(value + 1, 0xFF, sizeof *value, stream));
  exchange(comm);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  static_cast<void>(cudaGetLastError());
  EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  expect_success(cudaStreamSynchronize(stream));
  EXPECT_EQ(read_back(value, 2)[1], -1) << "what was called off has not arrived";

  comm = connected();
  exchange(comm);
  expect_success(cudaStreamSynchronize(stream));
  EXPECT_EQ(read_back(value, 2)[1], (rank + size - 1) % size);

  ncclResult_t state = ncclSuccess;
  for (const ncclResult_t expected : {ncclSuccess, ncclSuccess, ncclRemoteError, ncclRemoteError}) {
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    EXPECT_EQ(state, expected);
  }
  EXPECT_EQ(ncclSend(value, 1, ncclInt32, 0, comm, stream), ncclSystemError);
  EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  expect_success(cudaFree(value));
  expect_success(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace emulation::test
