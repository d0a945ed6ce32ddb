// What the environment asks for: drivers, devices, failures, the log. Each in a process of its own.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

#include "temporary_directory.hpp"
#include "test_kernels.hpp"

namespace emulation::test {
namespace {

void expect_driver(const char* driver, cudaError_t error, cudaError_t version_error, int version) {
  setenv("GRADCLIP_EMULATION_DRIVER", driver, 1);
  int count = -7;
  EXPECT_EQ(cudaGetDeviceCount(&count), error);
  EXPECT_EQ(count, -7) << "left alone";
  EXPECT_EQ(cudaGetLastError(), error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  int driver_version = -1, runtime_version = -1;
  EXPECT_EQ(cudaDriverGetVersion(&driver_version), version_error);
  EXPECT_EQ(driver_version, version);
  EXPECT_EQ(cudaRuntimeGetVersion(&runtime_version), cudaSuccess);
  EXPECT_EQ(runtime_version, CUDART_VERSION);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 8), error);
  EXPECT_EQ(cudaSetDevice(0), error);
  EXPECT_EQ(launch_count(nullptr, 1, 1, nullptr), error);
}

TEST(SettingsDeathTest, NoDriver) {
  in_own_process([] { expect_driver("none", cudaErrorInsufficientDriver, cudaSuccess, 0); });
}
TEST(SettingsDeathTest, OldDriver) {
  in_own_process([] { expect_driver("old", cudaErrorInsufficientDriver, cudaSuccess, 12000); });
}
TEST(SettingsDeathTest, StubDriver) {
  in_own_process([] { expect_driver("stub", cudaErrorStubLibrary, cudaErrorStubLibrary, CUDART_VERSION); });
}
TEST(SettingsDeathTest, NoDevice) {
  in_own_process([] { expect_driver("no-device", cudaErrorNoDevice, cudaSuccess, CUDART_VERSION); });
}
TEST(SettingsDeathTest, BrokenDriver) {
  in_own_process([] { expect_driver("broken", cudaErrorUnknown, cudaSuccess, CUDART_VERSION); });
}
TEST(SettingsDeathTest, MisspeltValuesEndTheProgram) {
  EXPECT_DEATH(expect_driver("nnoe", cudaSuccess, cudaSuccess, 0), "GRADCLIP_EMULATION_DRIVER=nnoe");
}

TEST(SettingsDeathTest, SeveralDevices) {
  in_own_process([&] {
    setenv("GRADCLIP_EMULATION_DEVICES", "2", 1);
    setenv("GRADCLIP_EMULATION_MEMORY", "100000", 1);
    int count = 0;
    expect_success(cudaGetDeviceCount(&count));
    EXPECT_EQ(count, 2);
    EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
    cudaDeviceProp properties[2];
    char bus[2][16];
    for (const int device : {0, 1}) {
      expect_success(cudaGetDeviceProperties(&properties[device], device));
      expect_success(cudaDeviceGetPCIBusId(bus[device], sizeof bus[device], device));
      expect_success(cudaSetDevice(device));
      void* memory = nullptr;
      expect_success(cudaMalloc(&memory, 80'000));  // each has its own
    }
    EXPECT_STREQ(properties[1].name, "Emulated GPU");
    EXPECT_EQ(properties[1].major, 9);
    EXPECT_EQ(properties[1].totalGlobalMem, 100'000u);
    EXPECT_NE(std::memcmp(&properties[0].uuid, &properties[1].uuid, sizeof properties[0].uuid), 0);
    EXPECT_STRNE(bus[0], bus[1]);
    cudaStream_t stream = new_stream();
    expect_success(cudaSetDevice(0));
    EXPECT_EQ(launch_count(nullptr, 1, 1, stream), cudaErrorInvalidResourceHandle) << "a stream of device 1";
  });
}

TEST(SettingsDeathTest, CallsFail) {
  in_own_process([&] {
    setenv("GRADCLIP_EMULATION_FAIL", "cudaMalloc:2,cudaHostAlloc:1+,cudaEventCreateWithFlags:1:801,cudaFree:1@3", 1);
    void* memory = nullptr;
    cudaEvent_t event = nullptr;
    expect_success(cudaMalloc(&memory, 8));
    EXPECT_EQ(cudaMalloc(&memory, 8), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    expect_success(cudaMalloc(&memory, 8));
    for (int i = 0; i < 3; ++i) EXPECT_EQ(cudaHostAlloc(&memory, 8, 0), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaEventCreateWithFlags(&event, 0), cudaErrorNotSupported);
    expect_success(cudaFree(nullptr));  // of process 3 only
  });
}

TEST(SettingsDeathTest, AKernelThatFailsBreaksItsDevice) {
  in_own_process([&] {
    setenv("GRADCLIP_EMULATION_FAIL", "kernel:2", 1);
    setenv("GRADCLIP_EMULATION_DEVICES", "2", 1);
    auto* const device = device_array<unsigned long long>(1);
    expect_success(launch_count(device, 1, 32, nullptr));
    expect_success(cudaDeviceSynchronize());
    expect_success(launch_count(device, 1, 32, nullptr));  // a launch only enqueues
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress) << "stays";
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 8), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaFree(device), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaSetDevice(1), cudaSuccess) << "the other one works";
    expect_success(cudaMalloc(&memory, 8));
  });
}

TEST(SettingsDeathTest, LaunchesAndCopiesFail) {
  in_own_process([&] {
    setenv("GRADCLIP_EMULATION_FAIL", "launch:1,copy:2,cudaStreamSynchronize:3", 1);
    auto* const device = device_array<unsigned long long>(1);
    cudaStream_t stream = new_stream();
    EXPECT_EQ(launch_count(device, 1, 32, stream), cudaErrorLaunchOutOfResources);
    expect_success(launch_count(device, 1, 32, stream));
    expect_success(cudaStreamSynchronize(stream));
    unsigned long long host = 0;
    expect_success(cudaMemcpy(&host, device, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT_EQ(cudaMemcpy(&host, device, sizeof host, cudaMemcpyDeviceToHost), cudaErrorLaunchFailure);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
  });
}

TEST(SettingsDeathTest, TheLogTellsWhatRanAndWhatWasLeft) {
  const gradclip::test::TemporaryDirectory directory;
  setenv("GRADCLIP_TEST_LOG", (directory / "log").c_str(), 0);  // the other process begins anew, with its parent's file
  const std::string log = getenv("GRADCLIP_TEST_LOG");
  in_own_process([&] {
    setenv("GRADCLIP_EMULATION_LOG", log.c_str(), 1);
    auto* const device = device_array<unsigned long long>(1000);
    expect_success(launch_count(device, 1, 32, nullptr));
    expect_success(launch_count(device, 1, 32, nullptr));
    expect_success(cudaDeviceSynchronize());
    new_stream();
  });
  std::ifstream file(log);
  std::stringstream text;
  text << file.rdbuf();
  for (const char* part : {"process=0 ", " peak_device_bytes=8192 ", " live_allocations=1 ", " live_streams=1 ",
                           " live_events=0 ", " kernel=2 ", " launch=2", " cudaMalloc=1 "}) {
    EXPECT_THAT(text.str(), testing::HasSubstr(part));
  }
  std::remove(log.c_str());
}

TEST(Errors, HaveTheirRealNames) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorInsufficientDriver), "cudaErrorInsufficientDriver");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorInsufficientDriver),
               "CUDA driver version is insufficient for CUDA runtime version");
  EXPECT_STREQ(cudaGetErrorName(static_cast<cudaError_t>(12345)), "unrecognized error code");
}

}  // namespace
}  // namespace emulation::test
