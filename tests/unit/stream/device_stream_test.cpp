// The stream on a device: shards that stay there between passes, and that a failed pass leaves nothing half done.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "deferred_backend.hpp"
#include "dump_builder.hpp"
#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/stream/shard_stream.hpp"
#include "gradclip/stream/task_list.hpp"

namespace gradclip::test {
namespace {

using testing::IsEmpty;

constexpr std::int64_t kLarge = 3 * static_cast<std::int64_t>(kChunkElements) + 77;

/// What a sink heard of each parameter: position, sum and hash of every chunk.
using Heard = std::map<std::size_t, std::vector<std::tuple<std::uint64_t, double, std::uint64_t>>>;

class DeviceStream : public testing::Test {
 protected:
  DeviceStream() {
    DumpBuilder dump(directory_ / "dump", 1);
    const auto add = [&](std::string name, std::int64_t elements, std::string dtype, std::int64_t part) {
      dump.parameter({.name = name,
                      .shape = {elements},
                      .dtype = std::move(dtype),
                      .ranks = {0},
                      .copies = "distinct",
                      .model_part = part});
      std::vector<double> values(static_cast<std::size_t>(elements));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 101) - 50.0;
      dump.tensor(name, std::move(values));
    };
    add("small", 3, "float32", 0);
    add("large", kLarge, "float32", 1);
    add("empty", 0, "float32", 1);
    add("narrow", 999, "bfloat16", 0);
    reader_.emplace(dump.write());
    for (const ShardTask& task : tasks(false).tasks) bytes_ += task.shard->elements * size_of(task.shard->dtype);
  }

  TaskList tasks(bool fingerprint) {
    TaskList list = list_tasks(*reader_, {0, 4}, 0, [](auto, auto) { return ScaleFactors{}; });
    for (ShardTask& task : list.tasks) task.fingerprint = fingerprint;
    return list;
  }

  /// @param fails_at  the sink throws at that chunk
  Heard measure(ShardStream& stream, bool fingerprint, std::size_t fails_at = 1000) {
    const TaskList list = tasks(fingerprint);
    Heard heard;
    std::size_t chunks = 0;
    std::mutex mutex;
    stream.measure(list.tasks, list.factors, {}, [&](const MeasuredChunk& chunk) {
      const std::lock_guard lock(mutex);
      if (chunks++ == fails_at) throw Error(ExitCode::resources, {.where = "a test's sink"});
      heard[list.tasks[chunk.task].parameter].emplace_back(chunk.position, chunk.statistics.power_sum,
                                                           chunk.fingerprint);
    });
    return heard;
  }

  Heard on_the_host(bool fingerprint) {
    const auto cpu = make_backend(DeviceChoice::cpu).backend;
    ShardStream stream(*cpu, {});
    return measure(stream, fingerprint);
  }

  static StreamOptions options(std::size_t threads, std::size_t block_bytes) {
    StreamOptions options;
    options.threads = threads;
    options.block_bytes = block_bytes;
    return options;
  }

  TemporaryDirectory directory_;
  std::optional<DumpReader> reader_;
  std::size_t bytes_ = 0;
  DeferredBackend device_;
};

TEST_F(DeviceStream, ShowsStoredElementsWhateverIsKept) {
  ShardStream stream(device_, options(3, 300'000));
  for (const bool kept : {false, true}) {
    TaskList list = tasks(false);
    for (ShardTask& task : list.tasks) task.shown = true;
    std::mutex mutex;
    std::map<std::size_t, std::uint64_t> seen;
    std::uint64_t wrong = 0;
    stream.measure(list.tasks, list.factors, {}, {}, [&](std::size_t, const StoredElements& elements) {
      const std::lock_guard lock(mutex);
      const ShardTask& task = list.tasks[elements.task];
      seen[task.parameter] += elements.count;
      if (task.parameter != 1) return;
      for (std::uint64_t i = 0; i < elements.count; ++i) {
        const float x = reinterpret_cast<const float*>(elements.data)[i];
        wrong += x >= -50.0F && x <= 50.0F ? 0 : 1;
      }
    });
    EXPECT_EQ(seen, (std::map<std::size_t, std::uint64_t>{{0, 3}, {1, kLarge}, {3, 999}}));
    EXPECT_EQ(wrong, 0u);
    EXPECT_EQ(stream.bytes_read(), (kept ? 2 : 1) * bytes_) << "counting takes the file's bytes";
  }
  EXPECT_THAT(device_.violations(), IsEmpty());
}

TEST_F(DeviceStream, HandsOnWhatTheHostDoesAndKeepsIt) {
  const Heard hashed = on_the_host(true), plain = on_the_host(false);
  for (const std::size_t threads : {1u, 4u}) {
    for (const std::size_t block_bytes : {std::size_t{1}, std::size_t{300'000}, std::size_t{0}}) {
      ShardStream stream(device_, options(threads, block_bytes));
      EXPECT_EQ(measure(stream, true), hashed);
      EXPECT_EQ(stream.bytes_read(), bytes_);
      EXPECT_EQ(stream.storage().bytes(MemorySpace::device), bytes_);
      const std::size_t uploaded = device_.uploaded();
      EXPECT_EQ(measure(stream, false), plain);
      EXPECT_EQ(stream.bytes_read(), bytes_);
      EXPECT_EQ(measure(stream, true), hashed) << "hashing takes the file's bytes";
      EXPECT_EQ(stream.bytes_read(), 2 * bytes_);
      EXPECT_EQ(device_.uploaded(), uploaded);
    }
  }
  EXPECT_THAT(device_.violations(), IsEmpty());
  EXPECT_EQ(device_.live_buffers(), 0u);
}

TEST_F(DeviceStream, TakesShardsThatWaitInHostMemory) {
  const Heard hashed = on_the_host(true);
  ShardStream stream(device_, options(2, 1));
  static_cast<void>(measure(stream, false));
  for (auto& [key, shard] : stream.storage().part(1).shards) {
    std::optional<KeptShard> there =
        make_room(*stream.storage().part(1).budgets, device_, shard.buffer.size(), MemorySpace::pinned);
    ASSERT_TRUE(there.has_value());
    device_.move(shard.buffer.bytes(), there->buffer.bytes());
    there->complete = true;
    std::swap(shard, *there);
    device_.wait(UnusedMemory::keep);
  }
  const std::uint64_t read = stream.bytes_read();
  EXPECT_EQ(measure(stream, true), hashed);
  EXPECT_EQ(stream.bytes_read(), read + 3 * 4 + 999 * 2) << "only what is on the device is read, to be hashed";
  EXPECT_THAT(device_.violations(), IsEmpty());
}

TEST_F(DeviceStream, KeepsNothingOfAFailedPassThatIsNotWhole) {
  const Heard expected = on_the_host(false);
  for (std::size_t chunk = 0; chunk < 6; ++chunk) {
    ShardStream stream(device_, options(2, 1));
    EXPECT_THROW(static_cast<void>(measure(stream, false, chunk)), Error);
    for (const std::int64_t part : {0, 1}) {
      for (const auto& [key, shard] : stream.storage().part(part).shards) EXPECT_TRUE(shard.complete);
    }
    EXPECT_EQ(measure(stream, false), expected);
  }
  EXPECT_THAT(device_.violations(), IsEmpty());
  EXPECT_EQ(device_.live_buffers(), 0u);
}

TEST_F(DeviceStream, AFailedWritingPassLeavesNoScaledShards) {
  const Heard expected = on_the_host(false);
  for (std::size_t chunk = 0; chunk < 6; ++chunk) {
    ShardStream stream(device_, options(2, 1));
    static_cast<void>(measure(stream, false));
    TaskList list = tasks(false);
    for (ScaleFactors& factors : list.factors) {
      factors.clip = ClipStep::in_gradient_precision;
      factors.coefficient = 0.5;
    }
    const std::filesystem::path out = directory_ / ("out" + std::to_string(chunk));
    {
      DumpWriter writer(*reader_, out, false);
      writer.prepare();
      const auto file = writer.begin(reader_->rank_file(0));
      const std::vector<RankFileWriter*> writers(list.tasks.size(), file.get());
      std::atomic<std::size_t> chunks{0};
      EXPECT_THROW(stream.scale(list.tasks, writers, list.factors, {},
                                [&](const MeasuredChunk&) {
                                  if (chunks++ == chunk) throw Error(ExitCode::resources, {.where = "a test's sink"});
                                }),
                   Error);
    }
    EXPECT_EQ(measure(stream, false), expected);
  }
  EXPECT_THAT(device_.violations(), IsEmpty());
}

TEST_F(DeviceStream, KeepsNoMoreForTheLastPass) {
  ShardStream stream(device_, options(1, 0));
  stream.storage().keep_no_more();
  static_cast<void>(measure(stream, false));
  EXPECT_EQ(stream.storage().bytes(MemorySpace::device), 0u);
}

/// What the other tests rely on.
TEST(DeferredBackend, ShowsWhoDoesNotWait) {
  DeferredBackend device;
  const Buffer pinned = device.allocate(8, MemorySpace::pinned), there = device.allocate(8, MemorySpace::device);
  Buffer back = device.allocate(8, MemorySpace::pinned);
  device.wait(UnusedMemory::keep);
  std::memset(pinned.data(), 7, 8);
  device.move(pinned.bytes(), there.bytes());
  device.move(there.bytes(), back.bytes());
  EXPECT_EQ(back.data()[0], std::byte{0xFF});
  EXPECT_THAT(device.violations(), testing::SizeIs(1));  // so far nobody has waited
  device.wait(UnusedMemory::keep);
  EXPECT_EQ(back.data()[0], std::byte{7});
  EXPECT_THAT(device.violations(), IsEmpty());
  device.move(there.bytes(), back.bytes());
  std::thread([&] { back.reset(); }).join();
  EXPECT_THAT(device.violations(), testing::Contains(testing::HasSubstr("released")));
}

TEST(MemoryBudget, IsNeverExceededByThreads) {
  MemoryBudget budget(100);
  std::vector<std::size_t> taken(4, 0);
  std::vector<std::vector<MemoryBudget::Share>> shares(4);
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 1000; ++i) {
        if (auto share = budget.take(3)) {
          shares[thread].push_back(std::move(*share));
          ++taken[thread];
        }
        if (i % 3 == 0 && !shares[thread].empty()) {
          shares[thread].pop_back();
          --taken[thread];
        }
        EXPECT_LE(budget.used(), 100u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.used(), 3 * std::accumulate(taken.begin(), taken.end(), std::size_t{0}));
  shares.clear();
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_TRUE(budget.take(100).has_value());
  EXPECT_FALSE(budget.take(101).has_value());
  const auto half = budget.take(50);
  budget.limit_to_used();
  EXPECT_FALSE(budget.take(1).has_value());
  EXPECT_TRUE(budget.take(0).has_value());
}

}  // namespace
}  // namespace gradclip::test
