#include "gradclip/backend/cpu/cpu_backend.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "gradclip/base/error.hpp"

/// So that running out of memory can be tested under the address sanitizer, which reads this, too.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}

namespace gradclip {
namespace {

class CpuBackendTest : public testing::Test {
 protected:
  CpuBackend backend_{cpu::choose_kernels("")};
};

TEST_F(CpuBackendTest, BuffersAreAligned) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{65}, std::size_t{4} << 20, (std::size_t{4} << 20) + 1}) {
    const Buffer buffer = backend_.allocate(bytes, MemorySpace::pinned);
    EXPECT_EQ(buffer.size(), bytes);
    EXPECT_EQ(buffer.bytes().space, MemorySpace::pinned);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0u);
    buffer.data()[bytes - 1] = std::byte{1};
  }
  EXPECT_EQ(backend_.allocate(0, MemorySpace::host).size(), 0u);
}

TEST_F(CpuBackendTest, OutOfMemorySaysHowMuchWasAskedFor) {
  for (const std::size_t bytes : {std::size_t{1} << 62, std::numeric_limits<std::size_t>::max()}) {
    try {
      (void)backend_.allocate(bytes, MemorySpace::host);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::resources);
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
    }
  }
}

TEST_F(CpuBackendTest, MovesBytes) {
  std::vector<std::byte> from(1000, std::byte{7});
  std::vector<std::byte> to(1000);
  backend_.move({from.data(), from.size(), MemorySpace::host}, {to.data(), to.size(), MemorySpace::pinned});
  EXPECT_EQ(from, to);
  backend_.move({}, {});
  EXPECT_THROW(backend_.move({from.data(), 10, MemorySpace::host}, {to.data(), 11, MemorySpace::host}), Error);
}

TEST_F(CpuBackendTest, BrokenTablesAreBugs) {
  std::vector<std::byte> data(64);
  ChunkStatistics result;
  const Bytes out{reinterpret_cast<std::byte*>(&result), sizeof result, MemorySpace::host};
  const ScaleFactors factors;
  const Chunk no_such_factors{data.data(), 1, DType::float32, 1};
  EXPECT_THROW(backend_.statistics({{&no_such_factors, 1}, {&factors, 1}}, {}, out), Error);
  const Chunk too_large{data.data(), 65537, DType::float32, 0};
  EXPECT_THROW(backend_.statistics({{&too_large, 1}, {&factors, 1}}, {}, out), Error);
  EXPECT_THROW(backend_.combine({}, PartialOperation::sum, 1.0, {}), Error);
}

TEST_F(CpuBackendTest, NormsThatOverflowElsewhere) {
  const auto square_sum = [&](std::vector<float> values) {
    const Chunk chunk{reinterpret_cast<std::byte*>(values.data()), static_cast<std::uint32_t>(values.size()),
                      DType::float32, 0};
    const ScaleFactors factors;
    ChunkStatistics result;
    backend_.statistics({{&chunk, 1}, {&factors, 1}}, {}, {reinterpret_cast<std::byte*>(&result), sizeof result, {}});
    return result.power_sum;
  };
  EXPECT_NEAR(square_sum(std::vector<float>(128, 1e19F)) / 1.28e40, 1.0, 1e-6);
  EXPECT_NEAR(square_sum(std::vector<float>(100, 1e20F)) / 1e42, 1.0, 1e-6);
}

}  // namespace
}  // namespace gradclip
