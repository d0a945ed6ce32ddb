// All processes take a device, or none does. Processes are threads here.

#include "device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using testing::HasSubstr;

/// What the threads share: each one's bytes, between two barriers.
struct Exchange {
  explicit Exchange(int processes) : meet(processes), bytes(static_cast<std::size_t>(processes)) {}
  std::barrier<> meet;
  std::vector<std::vector<std::byte>> bytes;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(Exchange& exchange, int process) : exchange_(exchange), process_(process) {}
  [[nodiscard]] int process() const noexcept override { return process_; }
  [[nodiscard]] int size() const noexcept override { return static_cast<int>(exchange_.bytes.size()); }
  [[nodiscard]] CommunicatorDescription describe() const override { return {"threads", {}}; }
  void broadcast(Bytes bytes, int root) override {
    show(bytes);
    if (bytes.size != 0) std::memcpy(bytes.data, exchange_.bytes[static_cast<std::size_t>(root)].data(), bytes.size);
    exchange_.meet.arrive_and_wait();
  }
  void all_gather(Bytes mine, std::span<const std::size_t> counts, Bytes all) override {
    show(mine);
    std::size_t at = 0;
    for (std::size_t i = 0; i < counts.size(); at += counts[i++]) {
      std::memcpy(all.data + at, exchange_.bytes[i].data(), counts[i]);
    }
    exchange_.meet.arrive_and_wait();
  }
  void all_to_all(Bytes, std::span<const std::size_t>, Bytes, std::span<const std::size_t>) override { std::abort(); }
  void barrier() override { exchange_.meet.arrive_and_wait(); }
  Agreement abort(ExitCode code, const std::string&) override { return {code, true}; }

 private:
  void show(Bytes bytes) {
    exchange_.bytes[static_cast<std::size_t>(process_)].assign(bytes.data, bytes.data + bytes.size);
    exchange_.meet.arrive_and_wait();
  }

  Exchange& exchange_;
  int process_;
};

/// The CPU's backend under another description.
class Posing final : public Backend {
 public:
  explicit Posing(std::string identity) : identity_(std::move(identity)) {}
  [[nodiscard]] BackendDescription describe() const override {
    BackendDescription description;
    description.device = "cuda";
    description.working_space = MemorySpace::device;
    description.identity = identity_;
    return description;
  }
  [[nodiscard]] Buffer allocate(std::size_t, MemorySpace) override { return {}; }
  void move(Bytes, Bytes) override {}
  void wait(UnusedMemory) override {}
  void statistics(const ChunkTable&, const StatisticsRequest&, Bytes) override {}
  void scale(const ChunkTable&) override {}
  void combine(std::span<const ChunkTable>, PartialOperation, double, Bytes) override {}
  void accumulate(std::span<const Chunk>, const ChunkTable&, AccumulateStep) override {}

 private:
  std::string identity_;
};

struct Outcome {
  std::string device;
  std::string reason;
  std::size_t sharers = 0;
  std::optional<std::string> error;
};

/// @param identities  each process's device; empty: it has none
std::vector<Outcome> agree(const std::vector<std::string>& identities, const std::vector<DeviceChoice>& choices) {
  Exchange exchange(static_cast<int>(identities.size()));
  std::vector<Outcome> outcomes(identities.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < identities.size(); ++i) {
    threads.emplace_back([&, i] {
      ThreadCommunicator comm(exchange, static_cast<int>(i));
      const auto make = [&](DeviceChoice choice, std::size_t process_on_host) -> ChosenBackend {
        EXPECT_EQ(process_on_host, 7u);
        if (choice == DeviceChoice::cpu || identities[i].empty()) {
          return {make_backend(DeviceChoice::cpu).backend, choice == DeviceChoice::cpu ? "asked for" : "no driver"};
        }
        return {std::make_unique<Posing>(identities[i]), "a card"};
      };
      try {
        const AgreedBackend agreed = agree_on_backend(comm, choices[i], 7, make);
        outcomes[i] = {agreed.chosen.backend->describe().device, agreed.chosen.reason, agreed.sharers, {}};
      } catch (const Error& error) {
        outcomes[i].error = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

constexpr auto kAuto = DeviceChoice::automatic;

TEST(Device, EveryProcessTakesItsOwn) {
  const auto outcomes = agree({"a", "b", "a"}, {kAuto, kAuto, kAuto});
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.device, "cuda");
    EXPECT_EQ(outcome.reason, "a card");
  }
  EXPECT_EQ(outcomes[0].sharers, 2u);
  EXPECT_EQ(outcomes[1].sharers, 1u);
  EXPECT_EQ(outcomes[2].sharers, 2u);
}

TEST(Device, WithoutAnyTheReasonIsEachOnesOwn) {
  for (const Outcome& outcome : agree({"", ""}, {kAuto, kAuto})) {
    EXPECT_EQ(outcome.device, "cpu");
    EXPECT_EQ(outcome.reason, "no driver");
  }
}

TEST(Device, OneWithoutSendsAllToTheCpu) {
  for (const Outcome& outcome : agree({"a", "", "c"}, {kAuto, kAuto, kAuto})) {
    EXPECT_EQ(outcome.device, "cpu");
    EXPECT_THAT(outcome.reason, testing::MatchesRegex("process 1 on .+ has no device: no driver"));
  }
}

TEST(Device, WhoWasToldToUseItIsRefused) {
  const auto outcomes = agree({"a", "b"}, {DeviceChoice::cuda, DeviceChoice::cpu});
  ASSERT_TRUE(outcomes[0].error.has_value());
  EXPECT_THAT(*outcomes[0].error, HasSubstr("process 1 on "));
  EXPECT_THAT(*outcomes[0].error, HasSubstr("asked for"));
  EXPECT_EQ(outcomes[1].device, "cpu");
}

}  // namespace
}  // namespace gradclip
