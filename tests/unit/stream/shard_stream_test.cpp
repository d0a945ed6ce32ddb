// The stream hands every chunk on once and in order, whatever the blocks and threads.

#include "gradclip/stream/shard_stream.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "dump_builder.hpp"
#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/stream/task_list.hpp"

namespace gradclip {
namespace {

using test::DumpBuilder;
using test::TemporaryDirectory;

constexpr std::int64_t kLarge = 5 * static_cast<std::int64_t>(kChunkElements) + 77;

/// One rank with a tensor of six chunks between small and empty ones.
std::filesystem::path build(const TemporaryDirectory& directory) {
  DumpBuilder dump(directory / "dump", 1);
  std::vector<double> large;
  for (std::int64_t i = 0; i < kLarge; ++i) large.push_back(static_cast<double>(i % 1021 - 510));
  const auto plain = [](std::string name, std::int64_t elements, std::string dtype) {
    return test::ParameterSpec{
        .name = std::move(name), .shape = {elements}, .dtype = std::move(dtype), .ranks = {0}, .copies = "distinct"};
  };
  dump.parameter(plain("small", 3, "float32")).tensor("small", {1, -2, 3});
  dump.parameter(plain("large", kLarge, "float32")).tensor("large", large);
  dump.parameter(plain("empty", 0, "float32")).tensor("empty", {});
  dump.parameter(plain("wide", 5, "float64")).tensor("wide", {0.5, 0, -0.25, 8, 1e300});
  dump.parameter(plain("none", 7, "float32")).none(0, "none");
  dump.parameter(plain("narrow", 9, "bfloat16")).tensor("narrow", {1, 2, 3, 4, 5, 6, 7, 8, 9});
  return dump.write();
}

/// Everything the sink hears, by task; and that it hears it in order.
std::map<std::size_t, std::vector<MeasuredChunk>> listen(DumpReader& reader, StreamOptions options) {
  const auto backend = make_backend(DeviceChoice::cpu).backend;
  ShardStream stream(*backend, options);
  TaskList list =
      list_tasks(reader, {0, reader.manifest().parameters.size()}, 0, [](auto, auto) { return ScaleFactors{}; });
  for (ShardTask& task : list.tasks) task.fingerprint = true;
  std::map<std::size_t, std::vector<MeasuredChunk>> heard;
  std::mutex mutex;
  stream.measure(list.tasks, list.factors, {}, [&](const MeasuredChunk& chunk) {
    const std::lock_guard lock(mutex);
    heard[list.tasks[chunk.task].parameter].push_back(chunk);
  });
  return heard;
}

TEST(ShardStream, EveryChunkOnceAndInOrder) {
  const TemporaryDirectory directory;
  DumpReader reader(build(directory));
  std::optional<std::map<std::size_t, std::vector<MeasuredChunk>>> first;
  for (const std::size_t threads : {1u, 2u, 5u}) {
    for (const std::size_t block_bytes :
         {std::size_t{1}, std::size_t{300'000}, std::size_t{1} << 20, std::size_t{64} << 20}) {
      StreamOptions options;
      options.threads = threads;
      options.block_bytes = block_bytes;
      const auto heard = listen(reader, options);
      ASSERT_EQ(heard.size(), 4u);  // the empty tensor and the None gradient have no chunks
      const std::vector<MeasuredChunk>& large = heard.at(1);
      ASSERT_EQ(large.size(), 6u);
      for (std::size_t i = 0; i < large.size(); ++i) {
        EXPECT_EQ(large[i].position, i * kChunkElements);
        EXPECT_EQ(large[i].count, i < 5 ? kChunkElements : 77u);
      }
      EXPECT_EQ(heard.at(0).front().statistics.power_sum, 14.0);
      EXPECT_EQ(heard.at(5).front().statistics.signed_sum, 45.0);
      if (!first) first = heard;
      for (const auto& [parameter, chunks] : heard) {
        for (std::size_t i = 0; i < chunks.size(); ++i) {
          EXPECT_EQ(chunks[i].statistics.power_sum, first->at(parameter)[i].statistics.power_sum);
          EXPECT_EQ(chunks[i].fingerprint, first->at(parameter)[i].fingerprint);
        }
      }
    }
  }
}

TEST(ShardStream, ShowsEveryElementOnceToOneWorkerAtATime) {
  const TemporaryDirectory directory;
  DumpReader reader(build(directory));
  const auto backend = make_backend(DeviceChoice::cpu).backend;
  for (const std::size_t threads : {1u, 5u}) {
    StreamOptions options;
    options.threads = threads;
    options.block_bytes = 300'000;
    ShardStream stream(*backend, options);
    TaskList list = list_tasks(reader, {0, 6}, 0, [](auto, auto) { return ScaleFactors{}; });
    for (ShardTask& task : list.tasks) task.shown = task.parameter != 0;
    std::vector<std::array<std::uint64_t, 6>> seen(threads);
    std::vector<std::array<double, 6>> sums(threads);
    stream.measure(list.tasks, list.factors, {}, {}, [&](std::size_t worker, const StoredElements& elements) {
      const std::size_t parameter = list.tasks[elements.task].parameter;
      seen.at(worker)[parameter] += elements.count;
      if (parameter != 1) return;
      for (std::uint64_t i = 0; i < elements.count; ++i) {
        sums[worker][1] += reinterpret_cast<const float*>(elements.data)[i];
      }
    });
    std::array<std::uint64_t, 6> all{};
    double sum = 0.0, right = 0.0;
    for (std::size_t worker = 0; worker < threads; ++worker) {
      for (std::size_t p = 0; p < all.size(); ++p) all[p] += seen[worker][p];
      sum += sums[worker][1];
    }
    for (std::int64_t i = 0; i < kLarge; ++i) right += static_cast<double>(i % 1021 - 510);
    EXPECT_EQ(all, (std::array<std::uint64_t, 6>{0, kLarge, 0, 5, 0, 9}));
    EXPECT_EQ(sum, right);
  }
}

TEST(ShardStream, TheFirstErrorEndsThePass) {
  const TemporaryDirectory directory;
  DumpReader reader(build(directory));
  const auto backend = make_backend(DeviceChoice::cpu).backend;
  StreamOptions options;
  options.threads = 3;
  options.block_bytes = 1;
  ShardStream stream(*backend, options);
  const TaskList list =
      list_tasks(reader, {0, reader.manifest().parameters.size()}, 0, [](auto, auto) { return ScaleFactors{}; });
  EXPECT_THROW(stream.measure(list.tasks, list.factors, {},
                              [](const MeasuredChunk&) { throw Error(ExitCode::resources, {.where = "a test"}); }),
               Error);
}

/// The CPU's backend, watched.
class WatchedBackend final : public Backend {
 public:
  [[nodiscard]] BackendDescription describe() const override { return real_->describe(); }
  [[nodiscard]] Buffer allocate(std::size_t bytes, MemorySpace space) override { return real_->allocate(bytes, space); }
  void move(Bytes from, Bytes to) override { real_->move(from, to); }
  void statistics(const ChunkTable& table, const StatisticsRequest& request, Bytes out) override {
    measured += table.chunks.size();
    real_->statistics(table, request, out);
  }
  void scale(const ChunkTable& table) override {
    if (on_scale) on_scale(table);
    scaled += table.chunks.size();
    real_->scale(table);
  }
  void combine(std::span<const ChunkTable> addends, PartialOperation operation, double divisor, Bytes out) override {
    real_->combine(addends, operation, divisor, out);
  }
  void wait(UnusedMemory unused) override { real_->wait(unused); }
  void accumulate(std::span<const Chunk> into, const ChunkTable& from, AccumulateStep step) override {
    real_->accumulate(into, from, step);
  }

  std::function<void(const ChunkTable&)> on_scale;
  std::atomic<std::size_t> measured{0};
  std::atomic<std::size_t> scaled{0};

 private:
  std::unique_ptr<Backend> real_ = make_backend(DeviceChoice::cpu).backend;
};

/// Scales and writes the whole dump with three threads, one chunk per block or all in one.
void scale_all(DumpReader& reader, Backend& backend, const std::filesystem::path& out, std::size_t block_bytes,
               const std::function<void(ShardTask&)>& change, const std::function<void(const MeasuredChunk&)>& sink) {
  StreamOptions options;
  options.threads = 3;
  options.block_bytes = block_bytes;
  ShardStream stream(backend, options);
  TaskList list =
      list_tasks(reader, {0, reader.manifest().parameters.size()}, 0, [](auto, auto) { return ScaleFactors{}; });
  for (ShardTask& task : list.tasks) change(task);
  DumpWriter writer(reader, out, false);
  writer.prepare();
  const auto file = writer.begin(reader.rank_file(0));
  const std::vector<RankFileWriter*> writers(list.tasks.size(), file.get());
  stream.scale(list.tasks, writers, list.factors, {}, sink);
  static_cast<void>(file->finish());  // every element was written
}

TEST(ShardStream, WhoWaitsForAFailedPieceEndsWithItsError) {
  const TemporaryDirectory directory;
  DumpReader reader(build(directory));
  WatchedBackend backend;
  std::atomic<bool> failed{false};
  backend.on_scale = [&](const ChunkTable& table) {
    if (table.chunks.front().count != kChunkElements || failed.exchange(true)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // the others come to wait for this piece
    throw Error(ExitCode::nonfinite, {.where = "a test"});
  };
  for (int i = 0; i < 20; ++i) {
    failed = false;
    try {
      scale_all(reader, backend, directory / "out", 1, [](ShardTask&) {}, {});
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::nonfinite) << error.what();
    }
  }
}

TEST(ShardStream, MeasuresOnlyWhatIsHeard) {
  const TemporaryDirectory directory;
  DumpReader reader(build(directory));
  for (const std::size_t block_bytes : {std::size_t{1}, std::size_t{64} << 20}) {
    WatchedBackend backend;
    std::map<std::size_t, double> heard;
    std::mutex mutex;
    const auto only_narrow_and_small = [](ShardTask& task) {
      task.measured = task.parameter == 0 || task.parameter == 5;
    };
    scale_all(reader, backend, directory / "out", block_bytes, only_narrow_and_small, [&](const MeasuredChunk& chunk) {
      const std::lock_guard lock(mutex);
      heard[chunk.task] += chunk.statistics.signed_sum;
    });
    EXPECT_EQ(backend.scaled, 9u);
    EXPECT_EQ(backend.measured, 2u);
    EXPECT_EQ(heard, (std::map<std::size_t, double>{{0, 2.0}, {4, 45.0}}));
  }
}

TEST(TaskList, KnowsNoneGradients) {
  const TemporaryDirectory directory;
  DumpReader reader(build(directory));
  const TaskList list = list_tasks(reader, {0, 6}, 0, [](auto, auto) { return ScaleFactors{}; });
  EXPECT_EQ(list.tasks.size(), 5u);
  ASSERT_EQ(list.none.size(), 1u);
  EXPECT_EQ(list.none.front().parameter, 4u);
}

}  // namespace
}  // namespace gradclip
