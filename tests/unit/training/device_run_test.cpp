// Runs on a device whose calls run as late as they may: the same bits as on the CPU, each gradient read once where it
// fits, and every failure a single error.

#include "device_run.hpp"

#include <gmock/gmock.h>

#include <tuple>

#include "gradclip/base/error.hpp"

namespace gradclip::test {
namespace {

using testing::IsEmpty;

class DeviceRun : public testing::Test {
 protected:
  DeviceRun() { parts_dump(dump_).write(); }

  /// The CPU's run, made once.
  RunTrace on_the_cpu(Numerics numerics) {
    const auto cpu = make_backend(DeviceChoice::cpu).backend;
    RunOptions options;
    options.numerics = numerics;
    return run_over(dump_, cpu_output(numerics), *cpu, options);
  }
  [[nodiscard]] std::filesystem::path cpu_output(Numerics numerics) const {
    return directory_ / ("cpu_" + std::string(name(numerics)));
  }
  [[nodiscard]] std::filesystem::path fresh() { return directory_ / ("out_" + std::to_string(++outputs_)); }

  /// Room for the slots and so many bytes of shards.
  static std::size_t budget_for(RunOptions options, std::size_t shards) {
    DeferredBackend device;
    options.stream.device_memory_budget = std::size_t{1} << 40;
    options.stream.memory_budget = std::size_t{1} << 40;
    return ShardStream(device, options.stream).slot_bytes() + shards;
  }

  TemporaryDirectory directory_;
  std::filesystem::path dump_ = directory_ / "dump";
  int outputs_ = 0;
};

struct Variant {
  Numerics numerics;
  std::size_t block_bytes;
};

class DeviceRunOf : public DeviceRun, public testing::WithParamInterface<Variant> {};

TEST_P(DeviceRunOf, GivesTheBitsOfTheCpu) {
  const Numerics numerics = GetParam().numerics;
  const RunTrace expected = on_the_cpu(numerics);
  for (const std::size_t threads : {1u, 3u}) {
    for (const double part : {0.0, 0.4, 1.0}) {
      for (const bool offload : {false, true}) {
        SCOPED_TRACE(testing::Message() << threads << " threads, " << part << " kept, offload " << offload);
        RunOptions options;
        options.numerics = numerics;
        options.stream.threads = threads;
        options.stream.block_bytes = GetParam().block_bytes;
        options.stream.offload = offload;
        const auto shards = static_cast<std::size_t>(part * static_cast<double>(gradient_bytes(dump_)));
        options.stream.device_memory_budget = budget_for(options, shards);
        DeferredBackend device;
        const std::filesystem::path out = fresh();
        const RunTrace trace = run_over(dump_, out, device, options);
        expect_same_results(trace.result, expected.result);
        expect_same_files(cpu_output(numerics), out);
        std::filesystem::remove_all(out);
        const RunTrace norms = run_over(dump_, {}, device, options);
        EXPECT_EQ(norms.result.norm->total, expected.result.norm->total);
        EXPECT_THAT(device.violations(), IsEmpty());
        EXPECT_EQ(device.live_buffers(), 0u);
        EXPECT_LE(device.device_peak(), options.stream.device_memory_budget);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Numerics, DeviceRunOf,
                         testing::Values(Variant{Numerics::exact, 1}, Variant{Numerics::exact, 600'000},
                                         Variant{Numerics::automodel, 0}),
                         [](const auto& each) {
                           return std::string(name(each.param.numerics)) + "_" + std::to_string(each.param.block_bytes);
                         });

TEST_F(DeviceRun, HistogramsAreThoseOfTheCpu) {
  const std::filesystem::path path = directory_ / "with_partial";
  DumpBuilder dump = parts_dump(path);
  constexpr auto kElements = static_cast<std::int64_t>(kChunkElements) + 5;
  dump.parameter(
      {.name = "addends", .shape = {kElements}, .dtype = "float32", .mesh = "dp", .placements = {"Partial(sum)"}});
  for (const std::int32_t rank : {0, 1, 2}) {
    dump.local(rank, "addends", wide_spread(kElements, static_cast<unsigned>(rank) + 11u));
  }
  dump.none(0, "first.norm");  // the next copy counts
  dump.write();

  RunOptions options;
  options.histograms = true;
  const auto cpu = make_backend(DeviceChoice::cpu).backend;
  const Histograms expected = *run_over(path, {}, *cpu, options).result.norm->histograms;
  options.stream.threads = 3;
  options.stream.block_bytes = 600'000;
  for (const Numerics numerics : {Numerics::exact, Numerics::automodel}) {
    options.numerics = numerics;
    DeferredBackend device;
    const RunTrace trace = run_over(path, {}, device, options);
    EXPECT_EQ(trace.result.norm->histograms->parameters, expected.parameters);
    EXPECT_EQ(trace.result.norm->histograms->total, expected.total);
    EXPECT_EQ(trace.result.norm->statistics.elements, expected.total.elements());
    EXPECT_THAT(device.violations(), IsEmpty());
    EXPECT_EQ(device.live_buffers(), 0u);
  }
}

TEST_F(DeviceRun, ReadsAndUploadsOnceWhatFits) {
  const std::size_t all = gradient_bytes(dump_);
  for (const Numerics numerics : {Numerics::exact, Numerics::automodel}) {
    for (const bool offload : {false, true}) {
      RunOptions options;
      options.numerics = numerics;
      options.stream.threads = 3;
      options.stream.block_bytes = 600'000;
      options.stream.offload = offload;
      options.stream.device_memory_budget = budget_for(options, all);  // exactly
      DeferredBackend device;
      const RunTrace trace = run_over(dump_, fresh(), device, options);
      EXPECT_EQ(trace.bytes_read, all);
      EXPECT_EQ(trace.kept, 0u) << "what was written is freed";
      if (!offload) {
        EXPECT_EQ(device.uploaded(), all);
      }
    }
  }
}

TEST_F(DeviceRun, ReadsAgainWhatDoesNotFit) {
  const std::size_t all = gradient_bytes(dump_);
  RunOptions options;
  options.stream.block_bytes = 600'000;
  options.stream.device_memory_budget = budget_for(options, all - 1);
  DeferredBackend device;
  const RunTrace almost = run_over(dump_, fresh(), device, options);
  EXPECT_GT(almost.bytes_read, all);
  EXPECT_LT(almost.bytes_read, 2 * all);
  options.stream.device_memory_budget = 1;
  const RunTrace none = run_over(dump_, fresh(), device, options);
  EXPECT_EQ(none.bytes_read, 2 * all);
}

TEST_F(DeviceRun, UsesFewerWorkersWhereSlotsDoNotFit) {
  RunOptions options;
  options.stream.threads = 8;
  options.stream.block_bytes = 600'000;
  DeferredBackend device;
  const std::size_t eight = budget_for(options, 0);
  options.stream.device_memory_budget = eight / 2;
  EXPECT_EQ(ShardStream(device, options.stream).options().threads, 4u);
  EXPECT_EQ(ShardStream(device, options.stream).slot_bytes(), eight / 2);
  options.stream.device_memory_budget = 1;
  EXPECT_EQ(ShardStream(device, options.stream).options().threads, 1u);
  options.stream.device_memory_budget = std::size_t{1} << 40;
  options.stream.memory_budget = eight;
  EXPECT_EQ(ShardStream(device, options.stream).options().threads, 2u) << "a quarter for pinned memory";
}

TEST_F(DeviceRun, StreamsWhereOthersHaveTakenTheMemory) {
  const std::size_t all = gradient_bytes(dump_);
  const RunTrace expected = on_the_cpu(Numerics::exact);
  RunOptions options;
  options.stream.block_bytes = 600'000;
  options.stream.device_memory_budget = budget_for(options, all);
  DeferredBackend device(budget_for(options, all / 3));
  const std::filesystem::path out = fresh();
  const RunTrace trace = run_over(dump_, out, device, options);
  expect_same_results(trace.result, expected.result);
  expect_same_files(cpu_output(Numerics::exact), out);
  EXPECT_GT(trace.bytes_read, all);
  EXPECT_LT(trace.bytes_read, 2 * all);

  DeferredBackend full(budget_for(options, 0) - 1);
  try {
    static_cast<void>(run_over(dump_, fresh(), full, options));
    FAIL() << "no slots, no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::resources);
  }
}

TEST_F(DeviceRun, OffloadingHoldsOnePartAtATime) {
  std::size_t largest = 0;
  for (const std::int64_t part : {0, 1, 2}) largest = std::max(largest, gradient_bytes(dump_, part));
  RunOptions options;
  options.stream.threads = 2;
  options.stream.block_bytes = 600'000;
  options.stream.offload = true;
  options.numerics = Numerics::automodel;
  DeferredBackend device;
  const RunTrace trace = run_over(dump_, fresh(), device, options);
  EXPECT_EQ(trace.bytes_read, gradient_bytes(dump_)) << "the other parts wait in host memory";
  EXPECT_LE(device.device_peak(), largest + budget_for(options, 0));
  EXPECT_GE(device.device_peak(), largest);
  EXPECT_GT(device.releases(), 0u);
  options.stream.offload = false;
  DeferredBackend together;
  static_cast<void>(run_over(dump_, fresh(), together, options));
  EXPECT_GE(together.device_peak(), gradient_bytes(dump_));
}

TEST_F(DeviceRun, OffloadingDropsWhatDoesNotFitTheHost) {
  const RunTrace expected = on_the_cpu(Numerics::exact);
  RunOptions options;
  options.stream.block_bytes = 600'000;
  options.stream.offload = true;
  options.stream.memory_budget = gradient_bytes(dump_);  // half of it for parts that wait
  DeferredBackend device;
  const std::filesystem::path out = fresh();
  const RunTrace trace = run_over(dump_, out, device, options);
  expect_same_results(trace.result, expected.result);
  expect_same_files(cpu_output(Numerics::exact), out);
  EXPECT_GT(trace.bytes_read, gradient_bytes(dump_));
  EXPECT_LT(trace.bytes_read, 2 * gradient_bytes(dump_));
}

/// Datasets that are written through HDF5 are written in the order of the file, in which parts take turns.
TEST_F(DeviceRun, OffloadingWritesFilteredDatasetsInOrder) {
  const std::filesystem::path dump = directory_ / "deflated";
  parts_dump(dump).storage({.chunk = {1000}, .deflate = 1}).write();
  const auto cpu = make_backend(DeviceChoice::cpu).backend;
  const std::filesystem::path expected = fresh();
  static_cast<void>(run_over(dump, expected, *cpu, {}));
  for (const std::size_t threads : {1u, 3u}) {
    RunOptions options;
    options.stream.threads = threads;
    options.stream.block_bytes = 600'000;
    options.stream.offload = true;
    DeferredBackend device;
    const std::filesystem::path out = fresh();
    const RunTrace trace = run_over(dump, out, device, options);
    EXPECT_EQ(trace.bytes_read, gradient_bytes(dump));
    expect_same_files(expected, out);
    EXPECT_THAT(device.violations(), IsEmpty());
  }
}

class FailingDevice : public DeviceRun,
                      public testing::WithParamInterface<std::tuple<DeferredBackend::Failure, bool>> {};

/// Each call of the device in turn fails: the run ends in one error without output, or does without the call.
TEST_P(FailingDevice, EveryFailureIsOneError) {
  const auto [failure, offload] = GetParam();
  const RunTrace expected = on_the_cpu(Numerics::exact);
  RunOptions options;
  options.stream.threads = 2;
  options.stream.block_bytes = 1;
  options.stream.offload = offload;
  options.stream.device_memory_budget = budget_for(options, gradient_bytes(dump_) / 2);
  std::size_t failed = 0, done = 0;
  for (std::size_t call = 0;; call += call < 12 ? 1 : 41) {
    SCOPED_TRACE(testing::Message() << "failure of call " << call);
    DeferredBackend device;
    device.fail_at(call, failure);
    const std::filesystem::path out = fresh();
    try {
      const RunTrace trace = run_over(dump_, out, device, options);
      ++done;
      expect_same_results(trace.result, expected.result);
      expect_same_files(cpu_output(Numerics::exact), out);
    } catch (const Error& error) {
      ++failed;
      EXPECT_EQ(error.code(), ExitCode::resources) << error.what();
      EXPECT_FALSE(std::filesystem::exists(out));
      EXPECT_FALSE(std::filesystem::exists(out.string() + ".partial"));
    }
    std::filesystem::remove_all(out);
    EXPECT_EQ(device.live_buffers(), 0u);
    EXPECT_THAT(device.violations(), IsEmpty());
    if (device.calls() <= call) break;
  }
  EXPECT_GT(failed, 10u);
  EXPECT_GT(done, 0u);
}

INSTANTIATE_TEST_SUITE_P(Failures, FailingDevice,
                         testing::Combine(testing::Values(DeferredBackend::Failure::once,
                                                          DeferredBackend::Failure::late,
                                                          DeferredBackend::Failure::forever),
                                          testing::Bool()));

}  // namespace
}  // namespace gradclip::test
