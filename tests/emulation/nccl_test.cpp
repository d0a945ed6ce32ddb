// The emulated NCCL over several processes, with a device each.

#include <gtest/gtest.h>
#include <nccl.h>

#include <cstdlib>
#include <numeric>
#include <vector>

#include "nccl_test_support.hpp"
#include "test_kernels.hpp"

namespace emulation::test {
namespace {

// Before the first call reads it.
const bool kThreeDevices = setenv("GRADCLIP_EMULATION_DEVICES", "3", 1) == 0;

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(kThreeDevices);
    expect_success(cudaSetDevice(rank_));
    stream_ = new_stream();
    comm_ = connected();
  }
  void TearDown() override {
    EXPECT_EQ(ncclCommFinalize(comm_), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(comm_), ncclSuccess);
    expect_success(cudaStreamDestroy(stream_));
  }

  int rank_ = gradclip::test::world().process();
  int size_ = gradclip::test::world().size();
  cudaStream_t stream_ = nullptr;
  ncclComm_t comm_ = nullptr;
};

/// Bytes that rank `from` sends to rank `to`; some pairs send nothing.
std::size_t volume(int from, int to) {
  return static_cast<std::size_t>((3 * from + 5 * to) % 4) * 1000;
}

unsigned char content(int from, int to, std::size_t i) {
  return static_cast<unsigned char>(static_cast<std::size_t>(7 * from + 31 * to) + i);
}

TEST_F(Nccl, AllToAllOfUnevenSizes) {
  std::vector<unsigned char> out;
  std::size_t incoming = 0;
  for (int peer = 0; peer < size_; ++peer) {
    for (std::size_t i = 0; i < volume(rank_, peer); ++i) out.push_back(content(rank_, peer, i));
    incoming += volume(peer, rank_);
  }
  out.push_back(0);  // neither is empty
  auto* const send = device_array<unsigned char>(out.size());
  auto* const receive = device_array<unsigned char>(incoming + 1);
  expect_success(cudaMemcpyAsync(send, out.data(), out.size(), cudaMemcpyHostToDevice, stream_));
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  std::size_t sent = 0, received = 0;
  for (int peer = 0; peer < size_; ++peer) {
    ASSERT_EQ(ncclSend(send + sent, volume(rank_, peer), ncclUint8, peer, comm_, stream_), ncclSuccess);
    ASSERT_EQ(ncclRecv(receive + received, volume(peer, rank_), ncclUint8, peer, comm_, stream_), ncclSuccess);
    sent += volume(rank_, peer);
    received += volume(peer, rank_);
  }
  ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady) << "it runs when it is waited for";
  static_cast<void>(cudaGetLastError());
  expect_success(cudaStreamSynchronize(stream_));
  const auto in = read_back(receive, incoming);
  std::size_t at = 0;
  for (int peer = 0; peer < size_; ++peer) {
    for (std::size_t i = 0; i < volume(peer, rank_); ++i) ASSERT_EQ(in[at++], content(peer, rank_, i));
  }
  expect_success(cudaFree(send));
  expect_success(cudaFree(receive));
}

TEST_F(Nccl, MessagesMeetInTheOrderOfIssue) {
  const int next = (rank_ + 1) % size_, before = (rank_ + size_ - 1) % size_;
  auto* const send = device_array<unsigned>(2);
  auto* const receive = device_array<unsigned>(2);
  const unsigned values[2] = {static_cast<unsigned>(10 * rank_), static_cast<unsigned>(10 * rank_ + 1)};
  expect_success(cudaMemcpy(send, values, sizeof values, cudaMemcpyHostToDevice));
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    ASSERT_EQ(ncclSend(send + i, 1, ncclUint32, next, comm_, stream_), ncclSuccess);
    ASSERT_EQ(ncclRecv(receive + i, 1, ncclUint32, before, comm_, stream_), ncclSuccess);
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
  }
  expect_success(cudaStreamSynchronize(stream_));
  const auto in = read_back(receive, 2);
  EXPECT_EQ(in[0], static_cast<unsigned>(10 * before));
  EXPECT_EQ(in[1], static_cast<unsigned>(10 * before + 1));
  expect_success(cudaFree(send));
  expect_success(cudaFree(receive));
}

TEST_F(Nccl, Collectives) {
  const auto size = static_cast<std::size_t>(size_);
  auto* const mine = device_array<int>(2);
  auto* const all = device_array<int>(2 * size);
  const int values[2] = {rank_, -rank_};
  expect_success(cudaMemcpy(mine, values, sizeof values, cudaMemcpyHostToDevice));
  ASSERT_EQ(ncclAllGather(mine, all, 2, ncclInt32, comm_, stream_), ncclSuccess);
  expect_success(cudaStreamSynchronize(stream_));
  const auto gathered = read_back(all, 2 * size);
  for (int i = 0; i < size_; ++i) EXPECT_EQ(gathered[static_cast<std::size_t>(2 * i + 1)], -i);

  ASSERT_EQ(ncclAllReduce(mine, mine, 2, ncclInt32, ncclSum, comm_, stream_), ncclSuccess);
  expect_success(cudaStreamSynchronize(stream_));
  EXPECT_EQ(read_back(mine, 2)[1], -size_ * (size_ - 1) / 2);

  ASSERT_EQ(ncclBroadcast(all, all, 2, ncclInt32, size_ - 1, comm_, stream_), ncclSuccess);
  expect_success(cudaStreamSynchronize(stream_));
  EXPECT_EQ(read_back(all, 2)[0], 0);
  expect_success(cudaFree(mine));
  expect_success(cudaFree(all));
}

TEST_F(Nccl, TakesDeviceMemoryOnly) {
  auto* const pinned = pinned_array<char>(10);
  auto* const device = device_array<char>(10);
  std::vector<char> pageable(10);
  EXPECT_EQ(ncclSend(pinned, 10, ncclUint8, 0, comm_, stream_), ncclInvalidArgument);
  EXPECT_EQ(ncclRecv(pageable.data(), 10, ncclUint8, 0, comm_, stream_), ncclInvalidArgument);
  EXPECT_EQ(ncclSend(device, 11, ncclUint8, 0, comm_, stream_), ncclInvalidArgument) << "beyond its end";
  EXPECT_EQ(ncclSend(device, 10, ncclUint8, size_, comm_, stream_), ncclInvalidArgument) << "no such peer";
  expect_success(cudaFreeHost(pinned));
  expect_success(cudaFree(device));
}

TEST_F(Nccl, NonblockingCommunicatorsAreAsked) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  ASSERT_EQ(ncclCommInitRankConfig(&comm, size_, shared_id(), rank_, &config), ncclInProgress);
  ASSERT_EQ(settled(comm), ncclSuccess);
  auto* const value = device_array<int>(1);
  expect_success(cudaMemcpy(value, &rank_, sizeof rank_, cudaMemcpyHostToDevice));
  EXPECT_EQ(ncclBroadcast(value, value, 1, ncclInt32, size_ - 1, comm, stream_), ncclInProgress);
  EXPECT_EQ(ncclBroadcast(value, value, 1, ncclInt32, 0, comm, stream_), ncclInvalidArgument) << "not asked";
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess) << "nothing is in the stream until then";
  ASSERT_EQ(settled(comm), ncclSuccess);
  expect_success(cudaStreamSynchronize(stream_));
  EXPECT_EQ(read_back(value, 1)[0], size_ - 1);
  EXPECT_EQ(ncclCommFinalize(comm), ncclInProgress);
  EXPECT_EQ(settled(comm), ncclSuccess);
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  expect_success(cudaFree(value));
}

TEST_F(Nccl, RefusesTwoProcessesOnOneDevice) {
  if (size_ == 1) GTEST_SKIP();
  expect_success(cudaSetDevice(0));
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclCommInitRank(&comm, size_, shared_id(), rank_), ncclInvalidUsage);
  EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("Duplicate GPU"), std::string::npos);
  expect_success(cudaSetDevice(rank_));
}

TEST_F(Nccl, RefusesAnIdThatWasNotShared) {
  if (size_ == 1) GTEST_SKIP();
  ncclUniqueId own{};
  ASSERT_EQ(ncclGetUniqueId(&own), ncclSuccess);
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclCommInitRank(&comm, size_, own, rank_), ncclInvalidUsage);
}

}  // namespace
}  // namespace emulation::test
