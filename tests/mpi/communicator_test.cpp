// Seam 2 over real processes: any number, uneven and empty contributions, failures that all processes agree on.

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>

#include "gradclip/comm/communicator.hpp"
#include "mpi_environment.hpp"

namespace gradclip {
namespace {

using test::world;

std::vector<std::uint32_t> numbers(std::size_t count, std::uint32_t first) {
  std::vector<std::uint32_t> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

TEST(Communicator, GathersOneValueInProcessOrder) {
  const std::vector<int> all = gather_value(world(), world().process() * 10);
  ASSERT_EQ(all.size(), static_cast<std::size_t>(world().size()));
  for (int i = 0; i < world().size(); ++i) EXPECT_EQ(all[static_cast<std::size_t>(i)], i * 10);
}

TEST(Communicator, GathersUnevenAndEmptyContributions) {
  // Process i brings i numbers: process 0 none.
  const auto mine =
      numbers(static_cast<std::size_t>(world().process()), 100u * static_cast<unsigned>(world().process()));
  const auto all = gather_values(world(), std::span<const std::uint32_t>(mine));
  std::vector<std::uint32_t> expected;
  for (int i = 0; i < world().size(); ++i) {
    const auto part = numbers(static_cast<std::size_t>(i), 100u * static_cast<unsigned>(i));
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT_EQ(all, expected);
}

TEST(Communicator, ExchangesUnevenLists) {
  const int me = world().process();
  std::vector<std::vector<std::uint32_t>> outgoing;
  for (int to = 0; to < world().size(); ++to) {
    outgoing.push_back(numbers(static_cast<std::size_t>((me + 2 * to) % 4), static_cast<unsigned>(1000 * me + to)));
  }
  const auto incoming = exchange_values(world(), outgoing);
  ASSERT_EQ(incoming.size(), static_cast<std::size_t>(world().size()));
  for (int from = 0; from < world().size(); ++from) {
    EXPECT_EQ(incoming[static_cast<std::size_t>(from)],
              numbers(static_cast<std::size_t>((from + 2 * me) % 4), static_cast<unsigned>(1000 * from + me)));
  }
}

TEST(Communicator, BroadcastsAString) {
  const int root = world().size() - 1;
  const std::string text = broadcast_string(world(), world().process() == root ? "from the last process" : "", root);
  EXPECT_EQ(text, "from the last process");
}

TEST(Communicator, RefusesDeviceMemory) {
  std::byte byte{};
  EXPECT_THROW(world().broadcast({&byte, 1, MemorySpace::device}, 0), Error);
  world().barrier();
}

TEST(Communicator, DescribesItself) {
  EXPECT_EQ(world().describe().name, "mpi");
  EXPECT_EQ(world().describe().processes_on_this_host, world().size());
}

// Several failures at once: one code, one speaker. The communicator stays usable, so later tests still run.
TEST(Communicator, AgreesOnTheGravestFailure) {
  const int me = world().process();
  const int last = world().size() - 1;
  ExitCode agreed = ExitCode::done;
  bool speaks = false;
  if (me == 0 || me == last) {
    const Agreement agreement =
        world().abort(me == last ? ExitCode::resources : ExitCode::bad_input, "expected by a test");
    agreed = agreement.code;
    speaks = agreement.speaks;
  } else {
    try {
      world().barrier();
    } catch (const PeerFailed& failed) {
      agreed = failed.code;
    }
  }
  EXPECT_EQ(agreed, ExitCode::resources);
  const std::vector<int> speakers = gather_value(world(), speaks ? 1 : 0);
  EXPECT_EQ(std::accumulate(speakers.begin(), speakers.end(), 0), 1);
  EXPECT_EQ(speakers.back(), 1);
}

TEST(SingleProcessCommunicator, CopiesItsOwn) {
  const auto alone = make_single_process_communicator();
  EXPECT_EQ(alone->size(), 1);
  EXPECT_EQ(gather_value(*alone, 7), std::vector<int>{7});
  const std::vector<std::vector<int>> own{{1, 2, 3}};
  EXPECT_EQ(exchange_values(*alone, own), own);
  const Agreement agreement = alone->abort(ExitCode::usage, "expected by a test");
  EXPECT_EQ(agreement.code, ExitCode::usage);
  EXPECT_TRUE(agreement.speaks);
}

}  // namespace
}  // namespace gradclip
