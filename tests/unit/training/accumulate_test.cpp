// The replay on any backend, with any memory: the same files.

#include "gradclip/training/accumulate.hpp"

#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "device_run.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip::test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

constexpr int kRanks = 3;

class Accumulate : public testing::Test {
 protected:
  /// A microbatch of three ranks. @param flags  further members of "microbatch"
  std::filesystem::path microbatch(int index, int count, const std::string& flags = "") {
    const std::filesystem::path path = directory_ / ("microbatch_" + std::to_string(++dumps_));
    DumpBuilder dump(path, kRanks);
    dump.member("microbatch",
                "{\"index\": " + std::to_string(index) + ", \"count\": " + std::to_string(count) + flags + "}");
    dump.mesh("dp", {"dp_shard"}, {kRanks}, {0, 1, 2});
    add(dump, "weight", kChunkElements + 77, "Shard(0)", "bfloat16", index);
    add(dump, "norm", 7, "Replicate()", "float32", index);
    add(dump, "none", 4, "Shard(0)", "float32", index);
    for (int rank = 0; rank < kRanks; ++rank) dump.none(rank, "none");
    return dump.write();
  }

  static void add(DumpBuilder& dump, const std::string& name, std::int64_t elements, const std::string& kept,
                  const std::string& dtype, int seed) {
    dump.parameter({.name = name,
                    .shape = {elements},
                    .dtype = dtype,
                    .mesh = "dp",
                    .placements = {kept},
                    .gradient_placements = {"Partial(avg)"}});
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<double> values;
      for (std::int64_t i = 0; i < elements; ++i)
        values.push_back(static_cast<double>((i * 37 + rank * 11 + seed * 5) % 251 - 125));
      dump.local(rank, name, std::move(values));
    }
  }

  MicrobatchDumps dumps(const std::vector<std::filesystem::path>& paths) {
    MicrobatchDumps opened;
    for (const std::filesystem::path& path : paths) opened.push_back(std::make_unique<DumpReader>(path));
    order_microbatches(opened);
    return opened;
  }

  std::filesystem::path replay(const std::vector<std::filesystem::path>& paths, Backend& backend, std::uint64_t memory,
                               std::size_t threads, AccumulateOptions options = {}) {
    const MicrobatchDumps opened = dumps(paths);
    const auto comm = make_single_process_communicator();
    const std::filesystem::path out = directory_ / ("out_" + std::to_string(++outputs_));
    DumpWriter writer(*opened[0], out, false);
    result_ = accumulate_microbatches({opened, *comm, backend, threads, memory, {}}, options, writer);
    return out;
  }

  TemporaryDirectory directory_;
  int dumps_ = 0, outputs_ = 0;
  AccumulateResult result_;
};

TEST_F(Accumulate, GivesTheSameBytesOnADeviceAndWithLittleMemory) {
  const std::vector<std::filesystem::path> paths{microbatch(1, 2), microbatch(0, 2)};
  const auto cpu = make_backend(DeviceChoice::cpu).backend;
  for (const auto sync : {Synchronisation::deferred, Synchronisation::every}) {
    for (const DType reduce : {DType::float32, DType::float16}) {
      const AccumulateOptions options{.sync = sync, .types = {.reduce = reduce, .storage = {}}};
      const std::filesystem::path expected = replay(paths, *cpu, std::uint64_t{1} << 30, 1, options);
      EXPECT_EQ(result_.windows(), sync == Synchronisation::every ? 2u : 1u);
      expect_same_files(expected, replay(paths, *cpu, 1, 2, options));
      DeferredBackend device;
      const std::uint64_t memory = std::uint64_t{1} << 20;
      expect_same_files(expected, replay(paths, device, memory, 2, options));
      EXPECT_THAT(device.violations(), IsEmpty());
      EXPECT_GT(device.uploaded(), 0u);
      EXPECT_LE(device.device_peak(), memory);
      EXPECT_EQ(device.live_buffers(), 0u);
    }
  }
}

TEST_F(Accumulate, GivesTheSameBytesWhereNotAllFilesCanBeOpen) {
  const std::vector<std::filesystem::path> paths{microbatch(0, 2), microbatch(1, 2)};
  const auto cpu = make_backend(DeviceChoice::cpu).backend;
  const std::filesystem::path expected = replay(paths, *cpu, std::uint64_t{1} << 30, 1);
  const MicrobatchDumps opened = dumps(paths);
  for (const std::unique_ptr<DumpReader>& dump : opened) dump->keep_at_most(1);
  const auto comm = make_single_process_communicator();
  const std::filesystem::path out = directory_ / "rounds";
  DumpWriter writer(*opened[0], out, false);
  // A thread's part of a round is less than a rank's part of the weight from three ranks.
  static_cast<void>(accumulate_microbatches({opened, *comm, *cpu, 6, 1 << 16, {}, 1}, {}, writer));
  expect_same_files(expected, out);
}

TEST_F(Accumulate, ADeviceThatFailsLeavesNothing) {
  const std::vector<std::filesystem::path> paths{microbatch(0, 1)};
  DeferredBackend device;
  device.fail_at(9, DeferredBackend::Failure::late);
  EXPECT_THROW(replay(paths, device, std::uint64_t{1} << 20, 2), Error);
  EXPECT_FALSE(std::filesystem::exists(directory_ / "out_1"));
  EXPECT_FALSE(std::filesystem::exists(directory_ / "out_1.partial"));
  EXPECT_EQ(device.live_buffers(), 0u);
}

TEST_F(Accumulate, NamesFlagsThatCannotBe) {
  struct Case {
    std::vector<std::string> first, optimizer;  ///< by microbatch
    std::vector<std::string> kinds;
  };
  const std::string on = "true", off = "false", unset = "null";
  const std::vector<Case> cases{
      {{on, off, off}, {off, off, on}, {}},
      {{unset, unset, unset}, {unset, unset, unset}, {}},
      {{on, unset, off}, {unset, unset, on}, {}},
      {{off, off, off}, {off, off, off}, {"fp8-cache", "sync-window"}},
      {{on, on, off}, {off, on, on}, {"fp8-cache", "sync-window"}},
      {{off, on, off}, {on, off, off}, {"fp8-cache", "sync-window"}},
  };
  for (const Case& one : cases) {
    std::vector<std::filesystem::path> paths;
    for (int k = 0; k < 3; ++k) {
      const auto at = static_cast<std::size_t>(k);
      paths.push_back(microbatch(
          k, 3, R"(, "first_microbatch": )" + one.first[at] + R"(, "optimizer_step": )" + one.optimizer[at]));
    }
    std::vector<std::string> kinds;
    for (const Finding& finding : flag_findings(dumps(paths))) kinds.push_back(finding.kind);
    EXPECT_EQ(kinds, one.kinds) << one.first[0] << one.first[1] << one.first[2];
  }
}

TEST_F(Accumulate, EndsWindowsWhereTheyWereRecorded) {
  const std::vector<std::filesystem::path> paths{microbatch(0, 3, R"(, "schedule_step": 4)"),
                                                 microbatch(1, 3, R"(, "schedule_step": 4, "synchronised": false)"),
                                                 microbatch(2, 3, R"(, "schedule_step": 5, "synchronised": true)")};
  EXPECT_THAT(synchronisation_windows(dumps(paths), {}), ElementsAre(false, false, true));
  EXPECT_THAT(synchronisation_windows(dumps(paths), Synchronisation::every), ElementsAre(true, true, true));
  EXPECT_THAT(synchronisation_windows(dumps(paths), Synchronisation::schedule), ElementsAre(false, true, true));
  const std::vector<std::filesystem::path> open{microbatch(0, 1, R"(, "synchronised": false)")};
  EXPECT_THROW(static_cast<void>(synchronisation_windows(dumps(open), {})), Error);
  EXPECT_THAT(synchronisation_windows(dumps(open), Synchronisation::deferred), ElementsAre(true));
}

}  // namespace
}  // namespace gradclip::test
