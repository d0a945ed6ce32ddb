// Streams and events: how late work runs, and what orders it.

#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <thread>

#include "test_kernels.hpp"

namespace emulation::test {
namespace {

constexpr unsigned kCount = 1000;

class Streams : public testing::Test {
 protected:
  void SetUp() override {
    host_ = pinned_array<float>(kCount);
    device_ = device_array<float>(kCount);
    for (unsigned i = 0; i < kCount; ++i) host_[i] = 1.0f;
  }

  void TearDown() override {
    expect_success(cudaFreeHost(host_));
    expect_success(cudaFree(device_));
    for (cudaStream_t stream : {one_, other_}) expect_success(cudaStreamDestroy(stream));
  }

  void to_device(cudaStream_t stream) {
    expect_success(cudaMemcpyAsync(device_, host_, kCount * sizeof(float), cudaMemcpyHostToDevice, stream));
  }
  void to_host(cudaStream_t stream) {
    expect_success(cudaMemcpyAsync(host_, device_, kCount * sizeof(float), cudaMemcpyDeviceToHost, stream));
  }
  void add_one(cudaStream_t stream) { expect_success(launch_multiply_add(device_, kCount, 1.0f, 1.0f, stream)); }

  float* host_ = nullptr;
  float* device_ = nullptr;
  cudaStream_t one_ = new_stream();
  cudaStream_t other_ = new_stream();
};

TEST_F(Streams, AMissingWaitIsSeen) {
  to_device(one_);
  add_one(one_);
  to_host(one_);
  EXPECT_EQ(host_[7], 1.0f) << "nothing has run";
  expect_success(cudaStreamSynchronize(one_));
  EXPECT_EQ(host_[7], 2.0f);
}

TEST_F(Streams, PinnedMemoryThatIsReusedTooEarlyIsSeen) {
  to_device(one_);
  host_[7] = 5.0f;
  expect_success(cudaStreamSynchronize(one_));
  EXPECT_EQ(read_back(device_, kCount)[7], 5.0f) << "the copy took what was there when it ran";
}

TEST_F(Streams, PageableMemoryMayBeReusedAtOnce) {
  std::vector<float> pageable(kCount, 3.0f);
  expect_success(cudaMemcpyAsync(device_, pageable.data(), kCount * sizeof(float), cudaMemcpyHostToDevice, one_));
  pageable.assign(kCount, 4.0f);
  expect_success(cudaMemcpyAsync(pageable.data(), device_, kCount * sizeof(float), cudaMemcpyDeviceToHost, one_));
  EXPECT_EQ(pageable[7], 3.0f);
}

TEST_F(Streams, AQueryIsOneStep) {
  to_device(one_);
  add_one(one_);
  to_host(one_);
  EXPECT_EQ(cudaStreamQuery(one_), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(one_), cudaErrorNotReady);
  EXPECT_EQ(host_[7], 1.0f);
  EXPECT_EQ(cudaStreamQuery(one_), cudaSuccess);
  EXPECT_EQ(host_[7], 2.0f);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
}

TEST_F(Streams, EventsOrderThem) {
  cudaEvent_t copied = nullptr;
  expect_success(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
  EXPECT_EQ(cudaEventQuery(copied), cudaSuccess) << "never recorded";
  to_device(one_);
  expect_success(cudaEventRecord(copied, one_));
  add_one(one_);  // after the event: nothing waits for it
  expect_success(cudaStreamWaitEvent(other_, copied, 0));
  expect_success(launch_multiply_add(device_, kCount, 10.0f, 0.0f, other_));
  EXPECT_EQ(cudaEventQuery(copied), cudaErrorNotReady);
  expect_success(cudaStreamSynchronize(other_));
  EXPECT_EQ(cudaEventQuery(copied), cudaSuccess);
  EXPECT_EQ(read_back(device_, kCount)[7], 10.0f);
  expect_success(cudaStreamSynchronize(one_));
  EXPECT_EQ(read_back(device_, kCount)[7], 11.0f);
  expect_success(cudaEventDestroy(copied));
  static_cast<void>(cudaGetLastError());
}

TEST_F(Streams, AMissingEventIsSeen) {
  to_device(one_);
  add_one(other_);
  expect_success(cudaStreamSynchronize(other_));
  expect_success(cudaStreamSynchronize(one_));
  EXPECT_EQ(read_back(device_, kCount)[7], 1.0f) << "the kernel ran before the copy that it was to follow";
}

TEST_F(Streams, TheNullStreamWaitsForBlockingOnes) {
  cudaStream_t blocking = nullptr;
  expect_success(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault));
  to_device(blocking);
  add_one(blocking);
  to_host(nullptr);
  expect_success(cudaStreamSynchronize(nullptr));
  EXPECT_EQ(host_[7], 2.0f);
  expect_success(cudaStreamDestroy(blocking));
}

TEST_F(Streams, TimesPassBetweenEvents) {
  cudaEvent_t start = nullptr, end = nullptr;
  expect_success(cudaEventCreateWithFlags(&start, cudaEventDefault));
  expect_success(cudaEventCreateWithFlags(&end, cudaEventDefault));
  expect_success(cudaEventRecord(start, one_));
  to_device(one_);
  expect_success(cudaEventRecord(end, one_));
  float milliseconds = -1.0f;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorNotReady);
  expect_success(cudaEventSynchronize(end));
  expect_success(cudaEventElapsedTime(&milliseconds, start, end));
  EXPECT_GE(milliseconds, 0.0f);
  for (cudaEvent_t event : {start, end}) expect_success(cudaEventDestroy(event));
  static_cast<void>(cudaGetLastError());
}

TEST_F(Streams, WorkOfADestroyedStreamIsDone) {
  cudaStream_t brief = new_stream();
  to_device(brief);
  expect_success(cudaStreamDestroy(brief));
  EXPECT_EQ(cudaStreamSynchronize(brief), cudaErrorInvalidResourceHandle);
  static_cast<void>(cudaGetLastError());
  expect_success(cudaDeviceSynchronize());
  EXPECT_EQ(read_back(device_, kCount)[7], 1.0f);
}

TEST_F(Streams, HostThreadsWorkSideBySide) {
  const auto work = [](unsigned long long* device, cudaStream_t stream) {
    auto* const host = pinned_array<unsigned long long>(1);
    for (int i = 1; i <= 50; ++i) {
      expect_success(launch_count(device, 2, 64, stream));
      expect_success(cudaMemcpyAsync(host, device, sizeof *host, cudaMemcpyDeviceToHost, stream));
      expect_success(cudaStreamSynchronize(stream));
      EXPECT_EQ(*host, 128u * static_cast<unsigned>(i));
    }
    expect_success(cudaFreeHost(host));
  };
  auto* const counters = device_array<unsigned long long>(2);
  expect_success(cudaMemsetAsync(counters, 0, 2 * sizeof *counters, nullptr));
  expect_success(cudaDeviceSynchronize());
  std::thread second(work, counters + 1, other_);
  work(counters, one_);
  second.join();
  expect_success(cudaFree(counters));
}

TEST(StreamDeathTest, EagerOnesRunAtOnce) {
  in_own_process([&] {
    setenv("GRADCLIP_EMULATION_EAGER", "1", 1);
    auto* const device = device_array<float>(kCount);
    auto* const host = pinned_array<float>(kCount);
    host[7] = 1.0f;
    cudaStream_t stream = new_stream();
    expect_success(cudaMemcpyAsync(device, host, kCount * sizeof(float), cudaMemcpyHostToDevice, stream));
    expect_success(launch_multiply_add(device, kCount, 1.0f, 1.0f, stream));
    expect_success(cudaMemcpyAsync(host, device, kCount * sizeof(float), cudaMemcpyDeviceToHost, stream));
    EXPECT_EQ(host[7], 2.0f);
  });
}

}  // namespace
}  // namespace emulation::test
