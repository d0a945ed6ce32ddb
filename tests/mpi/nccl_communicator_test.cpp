// Seam 2 on device memory over an emulated NCCL: every collective, uneven and empty, and when there is none of it.

#include "gradclip/comm/nccl_communicator.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "device_memory.hpp"
#include "ledger.hpp"
#include "mpi_environment.hpp"

namespace gradclip {
namespace {

using test::DeviceMemory;
using test::message;
using test::world;
using testing::HasSubstr;

using Content = std::vector<std::uint8_t>;

std::string device_of_its_own() {
  GRADCLIP_CUDA(cudaSetDevice(world().process()));
  return "device " + std::to_string(world().process());
}

void append(Content& to, const Content& more) {
  to.insert(to.end(), more.begin(), more.end());
}

// ---------------------------------------------------------------------------------------------------------------------
// Whether there is one
// ---------------------------------------------------------------------------------------------------------------------

TEST(NcclChoice, ForSeveralProcessesWithADeviceEach) {
  const ChosenCommunicator chosen = try_nccl_communicator(world(), device_of_its_own());
  if (world().size() == 1) {
    EXPECT_EQ(chosen.communicator, nullptr);
    EXPECT_EQ(chosen.reason, "one process");
  } else {
    EXPECT_NE(chosen.communicator, nullptr);
    EXPECT_EQ(chosen.reason, "every process has a device of its own");
  }
}

TEST(NcclChoice, NotWhereTwoShareADevice) {
  if (world().size() == 1) return;
  const int last = world().size() - 1;
  const std::string identity = world().process() == last ? "device 0" : device_of_its_own();
  const ChosenCommunicator chosen = try_nccl_communicator(world(), identity);
  EXPECT_EQ(chosen.communicator, nullptr);
  EXPECT_EQ(chosen.reason, "processes 0 and " + std::to_string(last) + " share one device");
}

TEST(NcclChoice, NotWhereOneHasNoDevice) {
  if (world().size() == 1) return;
  const ChosenCommunicator chosen = try_nccl_communicator(world(), world().process() == 1 ? "" : device_of_its_own());
  EXPECT_EQ(chosen.communicator, nullptr);
  EXPECT_EQ(chosen.reason, "process 1 has no CUDA device");
}

TEST(NcclChoice, TimeoutIsANumberOfSeconds) {
  if (world().size() == 1) return;
  for (const char* wrong : {"", "0", "1.5", "-1", "86401", "10 min", "99999999999999999999"}) {
    setenv("GRADCLIP_NCCL_TIMEOUT", wrong, 1);
    try {
      static_cast<void>(try_nccl_communicator(world(), device_of_its_own()));
      ADD_FAILURE() << "accepted: " << wrong;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_THAT(error.what(),
                  HasSubstr("GRADCLIP_NCCL_TIMEOUT: '" + std::string(wrong) + "'; expected whole seconds"));
    }
  }
  setenv("GRADCLIP_NCCL_TIMEOUT", "86400", 1);
  EXPECT_NE(try_nccl_communicator(world(), device_of_its_own()).communicator, nullptr);
  unsetenv("GRADCLIP_NCCL_TIMEOUT");
}

TEST(NcclChoice, LibraryHasAVersion) {
  EXPECT_THAT(nccl_library_version(), testing::MatchesRegex("NCCL [0-9]+\\.[0-9]+\\.[0-9]+"));
}

// ---------------------------------------------------------------------------------------------------------------------
// What it does
// ---------------------------------------------------------------------------------------------------------------------

class NcclCommunicator : public testing::Test {
 protected:
  void SetUp() override {
    if (world().size() == 1) GTEST_SKIP() << "one process has no NCCL";
    chosen_ = try_nccl_communicator(world(), device_of_its_own());
    ASSERT_NE(chosen_.communicator, nullptr);
  }

  [[nodiscard]] Communicator& nccl() { return *chosen_.communicator; }

  const int me_ = world().process();
  const std::size_t processes_ = static_cast<std::size_t>(world().size());

 private:
  ChosenCommunicator chosen_;
};

TEST_F(NcclCommunicator, DescribesItself) {
  const CommunicatorDescription description = nccl().describe();
  EXPECT_EQ(description.name, "nccl");
  EXPECT_EQ(description.detail, nccl_library_version() + " over " + std::to_string(processes_) + " devices");
  EXPECT_EQ(description.processes_on_this_host, world().size());
  EXPECT_TRUE(description.device_memory);
  EXPECT_FALSE(world().describe().device_memory);
  EXPECT_EQ(nccl().process(), me_);
  EXPECT_EQ(nccl().size(), world().size());
}

TEST_F(NcclCommunicator, BroadcastsFromEveryProcess) {
  for (int root = 0; root < world().size(); ++root) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{100'003}}) {
      const DeviceMemory memory(message(me_, 0, bytes));
      nccl().broadcast(memory.bytes(), root);
      EXPECT_EQ(memory.content(), message(root, 0, bytes)) << "from " << root;
    }
  }
}

TEST_F(NcclCommunicator, GathersUnevenAndEmptyContributions) {
  std::vector<std::size_t> counts;
  Content expected;
  for (std::size_t i = 0; i < processes_; ++i) {
    counts.push_back(1001 * i);  // nothing from process 0
    append(expected, message(static_cast<int>(i), 0, counts.back()));
  }
  const DeviceMemory mine(message(me_, 0, counts[static_cast<std::size_t>(me_)]));
  const DeviceMemory all(expected.size());
  nccl().all_gather(mine.bytes(), counts, all.bytes());
  EXPECT_EQ(all.content(), expected);
}

/// The own part may lie where it is to be.
TEST_F(NcclCommunicator, GathersInPlace) {
  const std::vector<std::size_t> counts(processes_, 777);
  Content expected;
  for (std::size_t i = 0; i < processes_; ++i) append(expected, message(static_cast<int>(i), 0, 777));
  const DeviceMemory all(message(me_, 0, 777 * processes_));
  const std::size_t own = 777 * static_cast<std::size_t>(me_);
  const Content before = message(me_, 0, 777);
  GRADCLIP_CUDA(cudaMemcpy(all.bytes().data + own, before.data(), before.size(), cudaMemcpyHostToDevice));
  GRADCLIP_CUDA(cudaDeviceSynchronize());
  nccl().all_gather(all.bytes().subspan(own, 777), counts, all.bytes());
  EXPECT_EQ(all.content(), expected);
}

void expect_exchange(Communicator& comm, const std::function<std::size_t(int from, int to)>& bytes) {
  const int me = comm.process();
  Content send, expected;
  std::vector<std::size_t> send_counts, receive_counts;
  for (int other = 0; other < comm.size(); ++other) {
    send_counts.push_back(bytes(me, other));
    receive_counts.push_back(bytes(other, me));
    append(send, message(me, other, send_counts.back()));
    append(expected, message(other, me, receive_counts.back()));
  }
  const DeviceMemory from(send);
  const DeviceMemory to(expected.size());
  comm.all_to_all(from.bytes(), send_counts, to.bytes(), receive_counts);
  EXPECT_EQ(to.content(), expected);
}

TEST_F(NcclCommunicator, ExchangesUnevenParts) {
  expect_exchange(nccl(), [](int from, int to) { return static_cast<std::size_t>(1000 * from + 7 * to + 1); });
}

TEST_F(NcclCommunicator, ExchangesEmptyParts) {
  expect_exchange(nccl(), [](int, int) { return std::size_t{0}; });
  expect_exchange(nccl(), [](int from, int to) { return static_cast<std::size_t>((from + 2 * to) % 3); });
  // Only to oneself; only to the next one; nothing from process 0.
  expect_exchange(nccl(), [](int from, int to) { return from == to ? std::size_t{50} : 0; });
  const int size = world().size();
  expect_exchange(nccl(), [size](int from, int to) { return (from + 1) % size == to ? std::size_t{60} : 0; });
  expect_exchange(nccl(), [](int from, int) { return from == 0 ? std::size_t{0} : 70; });
}

TEST_F(NcclCommunicator, ExchangesLargeParts) {
  expect_exchange(nccl(),
                  [](int from, int to) { return (std::size_t{1} << (19 + from)) + static_cast<std::size_t>(to); });
}

TEST_F(NcclCommunicator, LeavesHostMemoryToTheBase) {
  const std::uint64_t sent = emulation::calls_of("ncclSend");
  const std::vector<int> all = gather_value(nccl(), me_ * 10);
  for (std::size_t i = 0; i < processes_; ++i) EXPECT_EQ(all[i], static_cast<int>(i) * 10);
  EXPECT_EQ(broadcast_string(nccl(), me_ == 0 ? "from process 0" : "", 0), "from process 0");
  EXPECT_EQ(exchange_values(nccl(), std::vector<std::vector<int>>(processes_, {me_}))[1], std::vector<int>{1});
  const cuda::PinnedMemory pinned(64);
  std::memset(pinned.data(), me_ + 1, 64);
  nccl().broadcast({pinned.data(), 64, MemorySpace::pinned}, 1);
  EXPECT_EQ(std::to_integer<int>(pinned.data()[63]), 2);
  nccl().barrier();
  EXPECT_EQ(emulation::calls_of("ncclSend"), sent);
}

TEST_F(NcclCommunicator, RefusesAMixtureOfSpaces) {
  const DeviceMemory memory(8 * processes_);
  Content host(8 * processes_);
  const std::vector<std::size_t> counts(processes_, 8);
  EXPECT_THROW(nccl().all_to_all(memory.bytes(), counts, bytes_of(std::span<std::uint8_t>(host)), counts), Error);
  EXPECT_THROW(nccl().all_to_all(memory.bytes().subspan(0, 8), counts, memory.bytes(), counts), Error);
  nccl().barrier();
}

/// A process that fails calls abort in place of the collective: the others hear of it there, and nobody gets stuck in
/// NCCL, which stays as good as it was.
TEST_F(NcclCommunicator, HearsOfAFailureBeforeItBegins) {
  ExitCode agreed = ExitCode::done;
  if (me_ == world().size() - 1) {
    agreed = nccl().abort(ExitCode::bad_input, "expected by a test").code;
  } else {
    try {
      expect_exchange(nccl(), [](int, int) { return std::size_t{100}; });
    } catch (const PeerFailed& failed) {
      agreed = failed.code;
    }
  }
  EXPECT_EQ(agreed, ExitCode::bad_input);
  expect_exchange(nccl(), [](int, int) { return std::size_t{100}; });
}

/// Sums of floating-point numbers are ours: last, after everything above.
TEST(NcclUse, OnlySendsAndReceives) {
  for (const char* name : {"ncclAllReduce", "ncclReduce", "ncclReduceScatter"})
    EXPECT_EQ(emulation::calls_of(name), 0u);
  EXPECT_EQ(emulation::calls_of("ncclCommAbort"), 0u);
  EXPECT_EQ(emulation::calls_of("ncclCommDestroy"), emulation::calls_of("ncclCommInitRankConfig"));
  EXPECT_EQ(emulation::calls_of("ncclCommFinalize"), emulation::calls_of("ncclCommInitRankConfig"));
}

}  // namespace
}  // namespace gradclip
