// An emulated NCCL that fails or hangs: one error in every process, one message, and nothing that waits for ever. Each
// test is run by itself, in the environment that CMakeLists.txt gives it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <string>

#include "device_memory.hpp"
#include "gradclip/comm/nccl_communicator.hpp"
#include "ledger.hpp"
#include "mpi_environment.hpp"

namespace gradclip {
namespace {

using test::DeviceMemory;
using test::message;
using test::world;
using testing::AllOf;
using testing::HasSubstr;

ChosenCommunicator chosen() {
  GRADCLIP_CUDA(cudaSetDevice(world().process()));
  return try_nccl_communicator(world(), "device " + std::to_string(world().process()));
}

void exchange(Communicator& comm) {
  const std::vector<std::size_t> counts(static_cast<std::size_t>(comm.size()), 1000);
  const DeviceMemory from(message(comm.process(), 0, 1000 * counts.size()));
  const DeviceMemory to(1000 * counts.size());
  comm.all_to_all(from.bytes(), counts, to.bytes(), counts);
}

/// The error that `work` ends with in this process; it ends with one in every process.
template <class Work>
std::optional<Error> failure_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return std::nullopt;
}

/// What main does with an error: all agree on the code and on who speaks.
void expect_one_voice(const Error& error) {
  const Agreement agreement = world().abort(error.code(), error.what());
  EXPECT_EQ(agreement.code, ExitCode::resources);
  const std::vector<int> speakers = gather_value(world(), agreement.speaks ? 1 : 0);
  EXPECT_EQ(std::accumulate(speakers.begin(), speakers.end(), 0), 1);
}

/// After a failure NCCL is aborted once and never touched again; what goes through the base still does.
void expect_only_the_base_works(Communicator& nccl) {
  EXPECT_EQ(emulation::calls_of("ncclCommAbort"), 1u);
  const std::uint64_t asked = emulation::calls_of("ncclCommGetAsyncError");
  EXPECT_EQ(gather_value(nccl, nccl.process()).back(), nccl.size() - 1);
  const auto again = failure_of([&] { exchange(nccl); });
  ASSERT_TRUE(again);
  EXPECT_EQ(again->code(), ExitCode::resources);
  EXPECT_EQ(emulation::calls_of("ncclCommGetAsyncError"), asked);
}

void expect_no_orderly_end() {
  EXPECT_EQ(emulation::calls_of("ncclCommAbort"), 1u);
  EXPECT_EQ(emulation::calls_of("ncclCommFinalize"), 0u);
  EXPECT_EQ(emulation::calls_of("ncclCommDestroy"), 0u);
}

TEST(NcclFailure, HangEndsByTimeout) {
  {
    const ChosenCommunicator nccl = chosen();
    const auto failure = failure_of([&] { exchange(*nccl.communicator); });
    ASSERT_TRUE(failure);
    EXPECT_THAT(failure->what(),
                AllOf(HasSubstr("NCCL, all_to_all of "), HasSubstr("not done after 1 s"),
                      HasSubstr("GRADCLIP_NCCL_TIMEOUT"), HasSubstr("NCCL_DEBUG=INFO"), HasSubstr("--device cpu")));
    expect_one_voice(*failure);
    expect_only_the_base_works(*nccl.communicator);
  }
  expect_no_orderly_end();
}

TEST(NcclFailure, AsynchronousErrorEndsTheWait) {
  {
    const ChosenCommunicator nccl = chosen();
    const auto failure = failure_of([&] { exchange(*nccl.communicator); });
    ASSERT_TRUE(failure);
    EXPECT_THAT(failure->what(),
                AllOf(HasSubstr("NCCL, all_to_all of "), HasSubstr("network error (6)"), HasSubstr("NCCL_DEBUG=INFO")));
    expect_one_voice(*failure);
    expect_only_the_base_works(*nccl.communicator);
  }
  expect_no_orderly_end();
}

TEST(NcclFailure, SettingUpFails) {
  const auto failure = failure_of([] { static_cast<void>(chosen()); });
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code(), ExitCode::resources);
  EXPECT_THAT(failure->what(), AllOf(HasSubstr("NCCL, setting up: "), HasSubstr("NCCL_DEBUG=INFO")));
  expect_one_voice(*failure);
  expect_no_orderly_end();
}

TEST(NcclFailure, DeviceFails) {
  {
    const ChosenCommunicator nccl = chosen();
    const auto failure = failure_of([&] { exchange(*nccl.communicator); });
    ASSERT_TRUE(failure);
    EXPECT_THAT(failure->what(), HasSubstr("CUDA, cudaStreamQuery"));
    expect_one_voice(*failure);
  }
  expect_no_orderly_end();
}

/// One process fails where the others already wait for it in NCCL. Nothing of this returns: the process that fails ends
/// all of them (end_of_run.cmake looks at how).
TEST(NcclFailure, OneProcessEndsAll) {
  try {
    exchange(*chosen().communicator);
  } catch (const Error& error) {
    static_cast<void>(world().abort(error.code(), error.what()));
  }
  FAIL() << "process " << world().process() << " went on";
}

}  // namespace
}  // namespace gradclip
