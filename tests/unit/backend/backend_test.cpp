#include "gradclip/backend/backend.hpp"

#include <gtest/gtest.h>

#include <cstdlib>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

/// Sets GRADCLIP_CPU_KERNELS for the life of a test.
class ForcedKernels {
 public:
  explicit ForcedKernels(const char* name) { setenv("GRADCLIP_CPU_KERNELS", name, 1); }
  ForcedKernels(const ForcedKernels&) = delete;
  ForcedKernels& operator=(const ForcedKernels&) = delete;
  ~ForcedKernels() { unsetenv("GRADCLIP_CPU_KERNELS"); }
};

TEST(MakeBackend, CpuIsAlwaysThere) {
  const ChosenBackend chosen = make_backend(DeviceChoice::cpu);
  ASSERT_NE(chosen.backend, nullptr);
  EXPECT_EQ(chosen.backend->describe().device, "cpu");
  EXPECT_EQ(chosen.backend->describe().working_space, MemorySpace::host);
  EXPECT_FALSE(chosen.reason.empty());
}

TEST(MakeBackend, AutomaticSaysWhyNotCuda) {
  const ChosenBackend chosen = make_backend(DeviceChoice::automatic);
  ASSERT_NE(chosen.backend, nullptr);
  if (chosen.backend->describe().device == "cpu") {
    EXPECT_FALSE(chosen.reason.empty());
  }
}

TEST(MakeBackend, CudaThatIsNotThereIsAMatterOfResources) {
  try {
    const ChosenBackend chosen = make_backend(DeviceChoice::cuda);
    EXPECT_EQ(chosen.backend->describe().device, "cuda");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::resources);
    EXPECT_NE(std::string(error.what()).find("CUDA"), std::string::npos) << error.what();
  }
}

TEST(MakeBackend, EnvironmentForcesKernels) {
  const ForcedKernels forced("baseline");
  EXPECT_EQ(make_backend(DeviceChoice::cpu).backend->describe().detail, "baseline kernels");
}

TEST(MakeBackend, UnknownKernelsAreAUsageError) {
  const ForcedKernels forced("sse9");
  try {
    (void)make_backend(DeviceChoice::cpu);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find("'sse9'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("baseline"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace gradclip
