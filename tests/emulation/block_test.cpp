// Threads of a block: exchanges, barriers, orders, and the mistakes that are reported.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <set>

#include "test_kernels.hpp"

namespace emulation::test {
namespace {

unsigned bits(float value) {
  unsigned result = 0;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

TEST(Warp, ExchangesByWidthAndReduces) {
  for (const unsigned threads : {32u, 256u, 1024u}) {
    auto* const device = device_array<unsigned>(std::size_t{threads} * kWarpResults);
    expect_success(launch_warp_operations(device, threads, nullptr));
    const std::vector<unsigned> results = read_back(device, std::size_t{threads} * kWarpResults);
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned lane = i % 32;
      const unsigned* const mine = results.data() + std::size_t{i} * kWarpResults;
      EXPECT_EQ(mine[0], 3u);
      EXPECT_EQ(mine[1], lane / 8 * 8 + 3);
      EXPECT_EQ(mine[2], lane == 31 ? 31 : lane + 1);
      EXPECT_EQ(mine[3], lane % 4 < 2 ? lane + 2 : lane);
      EXPECT_EQ(mine[4], lane ^ 16u);
      EXPECT_EQ(mine[5], lane % 8 < 4 ? lane : lane - 4) << "a later segment may not be read, an earlier may";
      EXPECT_EQ(mine[6], lane == 0 ? 0 : lane - 1);
      EXPECT_EQ(mine[7], 496u);
      EXPECT_EQ(mine[8], 31u);
      EXPECT_EQ(mine[9], static_cast<unsigned>(-5));
      EXPECT_EQ(mine[10], 0xaaaaaaaau);
      EXPECT_EQ(mine[11], 1u);
      EXPECT_EQ(mine[12], 0u);
      EXPECT_EQ(mine[13], (lane + 8 < 32 ? lane + 8 : lane) * 4 + 1);
      EXPECT_EQ(mine[14], lane < 16 ? 5 : lane ^ 1u);
      EXPECT_EQ(mine[15], bits(1.0f));
    }
    expect_success(cudaFree(device));
  }
}

TEST(Block, MeetsAtBarriers) {
  constexpr unsigned kBlocks = 17;
  auto* const device = device_array<unsigned>(kBlocks);
  for (const unsigned threads : {32u, 256u, 1024u}) {
    expect_success(launch_block_sum(device, kBlocks, threads, nullptr));
    for (const unsigned sum : read_back(device, kBlocks)) EXPECT_EQ(sum, threads * (threads - 1) / 2);
  }
  expect_success(cudaFree(device));
}

TEST(Block, HasAtMost1024Threads) {
  auto* const device = device_array<unsigned>(1);
  EXPECT_EQ(launch_block_sum(device, 1, 1056, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  expect_success(cudaFree(device));
}

class DefectDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  static void run(Defect defect) {
    constexpr unsigned kCount = 64;
    auto* const device = device_array<unsigned>(kCount);
    expect_success(launch_defect(defect, device, kCount, nullptr));
    expect_success(cudaDeviceSynchronize());
    expect_success(cudaFree(device));
  }
};

TEST_F(DefectDeathTest, BarrierInDivergentCode) {
  EXPECT_DEATH(run(Defect::divergent_barrier), "barrier at .*test_kernels.cpp:[0-9]+ reached by 32 of 64 threads");
}

TEST_F(DefectDeathTest, BarriersAtTwoPlaces) {
  EXPECT_DEATH(run(Defect::different_barriers),
               "different barriers: .*test_kernels.cpp:[0-9]+ and .*test_kernels.cpp:");
}

TEST_F(DefectDeathTest, ShufflesAtTwoPlaces) {
  EXPECT_DEATH(run(Defect::different_shuffles),
               "wait for each other at different operations: .*test_kernels.cpp:[0-9]+ and ");
}

TEST_F(DefectDeathTest, ShuffleThatLanesDoNotReach) {
  EXPECT_DEATH(run(Defect::missing_lane), "deadlock.*\n.*16 threads in the warp operation .*test_kernels.cpp:");
}

TEST_F(DefectDeathTest, ShuffleFromOutsideTheMask) {
  EXPECT_DEATH(run(Defect::foreign_lane), "a lane outside the mask is read, .*test_kernels.cpp:");
}

// AddressSanitizer reports the access itself, a plain build the damage when the memory is freed.
TEST_F(DefectDeathTest, WriteBehindAnAllocation) {
  EXPECT_DEATH(run(Defect::write_behind), "wrote beyond the 256 bytes of an allocation|use-after-poison");
}

// The order of threads hides them from a comparison of results; only ThreadSanitizer sees them.
#if defined(__SANITIZE_THREAD__)
TEST_F(DefectDeathTest, MissingBarrier) {
  EXPECT_EXIT(
      {
        run(Defect::missing_barrier);
        std::exit(0);
      },
      testing::ExitedWithCode(66), "data race");
}

TEST_F(DefectDeathTest, MissingAtomic) {
  EXPECT_EXIT(
      {
        setenv("GRADCLIP_EMULATION_THREADS", "2", 1);
        run(Defect::missing_atomic);
        std::exit(0);
      },
      testing::ExitedWithCode(66), "data race");
}
#endif

TEST_F(DefectDeathTest, AccessFarBehindAnAllocation) {
  EXPECT_DEATH(run(Defect::read_far_behind), "access outside any allocation of device memory");
}

/// Who came when, in the order that is asked for.
std::vector<unsigned> arrivals(const char* order) {
  setenv("GRADCLIP_EMULATION_ORDER", order, 1);
  constexpr unsigned kThreads = 64;
  auto* const device = device_array<unsigned>(kThreads + 1);
  expect_success(cudaMemsetAsync(device, 0, sizeof(unsigned), nullptr));
  expect_success(launch_arrivals(device, device + 1, kThreads, nullptr));
  std::vector<unsigned> seen = read_back(device + 1, kThreads);
  expect_success(cudaFree(device));
  return seen;
}

TEST(OrderDeathTest, Forward) {
  in_own_process([&] {
    const auto seen = arrivals("0");
    EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  });
}

TEST(OrderDeathTest, Reversed) {
  in_own_process([&] {
    const auto seen = arrivals("1");
    EXPECT_TRUE(std::is_sorted(seen.rbegin(), seen.rend()));
  });
}

TEST(OrderDeathTest, Shuffled) {
  in_own_process([&] {
    const auto seen = arrivals("5");
    const bool all = std::set<unsigned>(seen.begin(), seen.end()).size() == seen.size();
    EXPECT_TRUE(all && !std::is_sorted(seen.begin(), seen.end()));
  });
}

TEST(OrderDeathTest, BlocksOnSeveralHostThreads) {
  in_own_process([&] {
    setenv("GRADCLIP_EMULATION_THREADS", "3", 1);
    auto* const device = device_array<unsigned long long>(1);
    expect_success(cudaMemsetAsync(device, 0, sizeof *device, nullptr));
    expect_success(launch_count(device, 100, 64, nullptr));
    const bool good = read_back(device, 1)[0] == 6400;
    auto* const sums = device_array<unsigned>(50);
    expect_success(launch_block_sum(sums, 50, 256, nullptr));
    const auto seen = read_back(sums, 50);
    EXPECT_TRUE(good && std::count(seen.begin(), seen.end(), 32640u) == 50);
  });
}

}  // namespace
}  // namespace emulation::test
