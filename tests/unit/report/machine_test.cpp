#include "machine.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "temporary_directory.hpp"

namespace gradclip {
namespace {

Launch launch_with(const std::map<std::string, std::string>& variables) {
  return detect_launch([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(Launch, OfTheEnvironment) {
  EXPECT_EQ(launch_with({}).launcher, Launcher::none);
  EXPECT_EQ(launch_with({{"OMPI_COMM_WORLD_SIZE", "4"}}).launcher, Launcher::mpi);
  EXPECT_EQ(launch_with({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}).launcher, Launcher::mpi);
  EXPECT_EQ(launch_with({{"PMI_RANK", "0"}}).launcher, Launcher::none);
  EXPECT_EQ(launch_with({{"PMIX_RANK", "0"}}).launcher, Launcher::mpi);
  EXPECT_EQ(launch_with({{"SLURM_PROCID", "0"}}).launcher, Launcher::none) << "a batch script";
  EXPECT_EQ(launch_with({{"SLURM_PROCID", "0"}, {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}).launcher, Launcher::mpi);
  EXPECT_EQ(launch_with({{"RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "4"}}).launcher, Launcher::mpi);
}

TEST(Launch, TorchrunSpeaksOnceAHost) {
  EXPECT_EQ(launch_with({{"RANK", "0"}}).launcher, Launcher::torchrun);
  EXPECT_EQ(launch_with({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).launcher, Launcher::torchrun);
  EXPECT_EQ(launch_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).launcher, Launcher::none);
  EXPECT_TRUE(launch_with({{"RANK", "8"}, {"LOCAL_RANK", "0"}}).first_on_host);
  EXPECT_FALSE(launch_with({{"RANK", "9"}, {"LOCAL_RANK", "1"}}).first_on_host);
}

class ControlGroups : public testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }

  test::TemporaryDirectory directory_;
  std::filesystem::path root_ = directory_.path();
};

TEST_F(ControlGroups, NoneIsNoLimit) {
  EXPECT_FALSE(control_group_memory_limit(root_).has_value());
}

TEST_F(ControlGroups, Version2TakesTheSmallestOfTheAncestors) {
  write("proc/self/cgroup", "0::/job/step\n");
  write("sys/fs/cgroup/job/step/memory.max", "max\n");
  write("sys/fs/cgroup/job/memory.max", "1000000\n");
  write("sys/fs/cgroup/memory.max", "3000000\n");
  EXPECT_EQ(control_group_memory_limit(root_), 1'000'000u);
}

TEST_F(ControlGroups, AContainerSeesItsOwnGroupAtTheMount) {
  write("proc/self/cgroup", "0::/system.slice/docker-0123.scope\n");
  write("sys/fs/cgroup/memory.max", "2000000\n");
  EXPECT_EQ(control_group_memory_limit(root_), 2'000'000u);
}

TEST_F(ControlGroups, Version1) {
  write("proc/self/cgroup", "9:cpu,cpuacct:/x\n5:memory:/job\n0::/\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "5000000\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(control_group_memory_limit(root_), 5'000'000u);
}

TEST_F(ControlGroups, Version1Unlimited) {
  write("proc/self/cgroup", "5:memory:/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_FALSE(control_group_memory_limit(root_).has_value());
}

TEST(Machine, Facts) {
  EXPECT_GT(physical_memory(), std::uint64_t{1} << 26);
  EXPECT_GT(peak_memory(), std::uint64_t{1} << 20);
  EXPECT_FALSE(allowed_processors().empty());
  EXPECT_EQ(place_of_process(), place_of_process());
  EXPECT_NE(place_of_process(), host_of_process());
}

}  // namespace
}  // namespace gradclip
