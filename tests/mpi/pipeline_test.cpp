// The whole pipeline over real processes: the same bits as one process on the CPU, and one failure ends all with one
// code. Built for each device (CMakeLists.txt).

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <set>

#include "dump_builder.hpp"
#include "file_content.hpp"
#include "gradclip/clip/clip.hpp"
#include "gradclip/comm/nccl_communicator.hpp"
#include "mpi_environment.hpp"

namespace gradclip {
namespace {

using test::DumpBuilder;
using test::TemporaryDirectory;
using test::wide_spread;
using test::world;

/// Process 0 makes a directory that all share.
class SharedDirectory {
 public:
  SharedDirectory() {
    if (world().process() == 0) own_.emplace();
    path_ = broadcast_string(world(), own_ ? own_->path().string() : "", 0);
  }
  ~SharedDirectory() { world().barrier(); }
  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::optional<TemporaryDirectory> own_;
  std::filesystem::path path_;
};

/// Eight recorded ranks: two stages of 2 × 2, with sharded, replicated, strided, Partial, tied and plain parameters.
void build(const std::filesystem::path& path) {
  DumpBuilder dump(path, 8);
  dump.mesh("world", {"pp", "dp", "tp"}, {2, 2, 2}, {0, 1, 2, 3, 4, 5, 6, 7});
  dump.mesh("stage0", {"dp", "tp"}, {2, 2}, {0, 1, 2, 3}).mesh("stage1", {"dp", "tp"}, {2, 2}, {4, 5, 6, 7});
  for (const std::string stage : {"0", "1"}) {
    const std::string mesh = "stage" + stage;
    const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, std::vector<std::string> placements,
                         std::string dtype = "float32", std::string tied = "") {
      std::int64_t elements = 1;
      for (const std::int64_t extent : shape) elements *= extent;
      dump.parameter({.name = name + stage,
                      .shape = std::move(shape),
                      .dtype = std::move(dtype),
                      .mesh = mesh,
                      .placements = std::move(placements),
                      .tied = std::move(tied)});
      dump.tensor(name + stage, wide_spread(elements, tied.empty() ? 7u + static_cast<unsigned>(elements) : 5u));
    };
    add("strided", {37, 3}, {"_StridedShard(dim=0, sf=2)", "Shard(0)"});
    add("both", {70, 1001}, {"Shard(0)", "Shard(1)"});
    add("norm", {5}, {"Shard(0)", "Replicate()"}, "float64");
    add("whole", {3, 7}, {"Replicate()", "Replicate()"}, "bfloat16");
    add("addend", {129, 3}, {"Shard(0)", "Partial(sum)"});
    add("tied", {11, 4}, {"Shard(0)", "Replicate()"}, "float32", "embedding");
  }
  dump.parameter({.name = "expert", .shape = {16}, .ranks = {1, 4, 6}, .copies = "distinct"});
  for (const std::int32_t rank : {1, 4, 6}) dump.local(rank, "expert", wide_spread(16, static_cast<unsigned>(rank)));
  dump.none(2, "norm0");
  dump.member("device_mesh", "\"world\"");
  dump.training("max_grad_norm", "1.0").training("pp_enabled", "true").training("pp_axis_name", "\"pp\"");
  dump.training("num_label_tokens", "24").training("dp_group_size", "2");
  dump.write();
}

/// What the processes work with together.
class Together {
 public:
  Together()
      : backend_(make_backend(DeviceChoice::GRADCLIP_TEST_DEVICE, static_cast<std::size_t>(world().process())).backend),
        nccl_(try_nccl_communicator(world(), backend_->describe().identity)) {}

  [[nodiscard]] Backend& backend() { return *backend_; }
  [[nodiscard]] Communicator& comm() { return nccl_.communicator ? *nccl_.communicator : world(); }
  /// Whether there are several processes, each with a device of its own. Collective.
  [[nodiscard]] bool expects_nccl() {
    const BackendDescription description = backend_->describe();
    const std::vector<std::size_t> all = gather_value(world(), std::hash<std::string>{}(description.identity));
    const std::set<std::size_t> distinct(all.begin(), all.end());
    return all.size() > 1 && description.working_space == MemorySpace::device && distinct.size() == all.size();
  }

 private:
  std::unique_ptr<Backend> backend_;
  ChosenCommunicator nccl_;
};

ClipResult clip(Communicator& comm, Backend& backend, const std::filesystem::path& dump,
                const std::filesystem::path& out, Numerics numerics) {
  DumpReader reader(dump);
  StreamOptions options;
  options.threads = 2;
  options.block_bytes = 4096;
  ShardStream stream(backend, options);
  Run run{reader, backend, comm, plan_work(reader.manifest(), comm.size()), stream};
  DumpWriter writer(reader, out, false);
  ClipOptions clip;
  clip.numerics = numerics;
  return scale_grads_and_clip_grad_norm(run, recorded_step(reader.manifest()), clip, &writer);
}

void expect_same(const ClipResult& a, const ClipResult& b) {
  const auto bits = [](double x) { return std::bit_cast<std::uint64_t>(x); };
  EXPECT_EQ(bits(a.total), bits(b.total));
  EXPECT_EQ(bits(a.total_after.value_or(-1)), bits(b.total_after.value_or(-1)));
  ASSERT_EQ(a.norm->parameters.size(), b.norm->parameters.size());
  for (std::size_t p = 0; p < a.norm->parameters.size(); ++p) {
    const TensorStatistics &x = a.norm->parameters[p].statistics, &y = b.norm->parameters[p].statistics;
    EXPECT_EQ(bits(a.norm->parameters[p].norm), bits(b.norm->parameters[p].norm)) << p;
    EXPECT_EQ(x.elements, y.elements) << p;
    EXPECT_EQ(x.zeros, y.zeros) << p;
    EXPECT_EQ(bits(x.mean()), bits(y.mean())) << p;
    EXPECT_EQ(a.norm->parameters[p].none, b.norm->parameters[p].none) << p;
  }
  ASSERT_EQ(a.norm->reference.totals.size(), b.norm->reference.totals.size());
  for (std::size_t i = 0; i < a.norm->reference.totals.size(); ++i) {
    EXPECT_EQ(bits(a.norm->reference.totals[i].total), bits(b.norm->reference.totals[i].total));
    EXPECT_EQ(a.norm->reference.totals[i].ranks, b.norm->reference.totals[i].ranks);
  }
  ASSERT_EQ(a.norm->findings.size(), b.norm->findings.size());
  for (std::size_t i = 0; i < a.norm->findings.size(); ++i) {
    EXPECT_EQ(a.norm->findings[i].kind, b.norm->findings[i].kind);
    EXPECT_EQ(a.norm->findings[i].message, b.norm->findings[i].message);
    EXPECT_EQ(a.norm->findings[i].ranks, b.norm->findings[i].ranks);
  }
}

TEST(Pipeline, SameBitsAsOneProcess) {
  const SharedDirectory directory;
  if (world().process() == 0) build(directory / "dump");
  world().barrier();
  Together together;
  EXPECT_EQ(together.comm().describe().device_memory, together.expects_nccl());
  const auto cpu = make_backend(DeviceChoice::cpu).backend;
  for (const Numerics numerics : {Numerics::exact, Numerics::automodel, Numerics::automodel_cpu}) {
    const std::string parallel_out = "together_" + std::string(name(numerics));
    const std::string alone = "alone_" + std::string(name(numerics)) + "_" + std::to_string(world().process());
    const ClipResult parallel =
        clip(together.comm(), together.backend(), directory / "dump", directory / parallel_out, numerics);
    const auto single = make_single_process_communicator();
    const ClipResult serial = clip(*single, *cpu, directory / "dump", directory / alone, numerics);
    expect_same(parallel, serial);
    EXPECT_TRUE(std::isfinite(parallel.total));
    // Rank-local experts: not every rank saw the same total.
    EXPECT_GT(parallel.norm->reference.totals.size(), 1u);
    for (const auto& entry : std::filesystem::directory_iterator(directory / alone)) {
      EXPECT_EQ(test::file_content(entry.path()),
                test::file_content(directory / parallel_out / entry.path().filename().string()))
          << entry.path().filename();
    }
  }
}

/// A rank file that one process cannot read ends the run of all, with one code and nothing left behind.
TEST(Pipeline, OneProcessErrorEndsAll) {
  const SharedDirectory directory;
  if (world().process() == 0) {
    build(directory / "dump");
    std::filesystem::resize_file(directory / "dump" / "rank_00006.h5", 1000);
  }
  world().barrier();
  Together together;
  ExitCode code = ExitCode::done;
  bool speaks = false;
  try {
    static_cast<void>(
        clip(together.comm(), together.backend(), directory / "dump", directory / "out", Numerics::exact));
  } catch (const Error& error) {
    const Agreement agreement = together.comm().abort(error.code(), error.what());
    code = agreement.code;
    speaks = agreement.speaks;
  } catch (const PeerFailed& failed) {
    code = failed.code;
  }
  EXPECT_EQ(code, ExitCode::bad_input);
  int speakers = 0;
  for (const int one : gather_value(world(), speaks ? 1 : 0)) speakers += one;
  EXPECT_EQ(speakers, 1);
  EXPECT_FALSE(std::filesystem::exists(directory / "out"));
  EXPECT_FALSE(std::filesystem::exists(directory / "out.partial"));
}

}  // namespace
}  // namespace gradclip
