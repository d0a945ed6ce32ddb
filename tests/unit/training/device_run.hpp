#pragma once
// Whole runs over small dumps, on any backend.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "deferred_backend.hpp"
#include "dump_builder.hpp"
#include "file_content.hpp"
#include "gradclip/backend/reduction.hpp"
#include "gradclip/clip/clip.hpp"

namespace gradclip::test {

/// Three ranks and three model parts, which take turns in the manifest: shards of several blocks, of several chunks, of
/// a few elements and of none, copies and None gradients.
inline DumpBuilder parts_dump(const std::filesystem::path& path) {
  DumpBuilder dump(path, 3);
  dump.mesh("dp", {"dp"}, {3}, {0, 1, 2});
  constexpr auto kChunk = static_cast<std::int64_t>(kChunkElements);
  const auto add = [&](std::string name, std::int64_t elements, std::string placement, std::string dtype,
                       std::int64_t part) {
    dump.parameter({.name = name,
                    .shape = {elements},
                    .dtype = std::move(dtype),
                    .mesh = "dp",
                    .placements = {std::move(placement)},
                    .model_part = part});
    dump.tensor(name, wide_spread(elements, static_cast<unsigned>(elements) + 3u));
  };
  add("embedding", 3 * (2 * kChunk + 77), "Shard(0)", "float32", 2);
  add("first.weight", 3 * kChunk, "Shard(0)", "bfloat16", 0);
  add("second.weight", 3 * kChunk + 1, "Shard(0)", "float32", 1);
  add("first.norm", 5, "Replicate()", "float64", 0);
  add("empty", 0, "Shard(0)", "float32", 1);
  add("second.bias", 2, "Shard(0)", "float32", 1);  // the last rank's shard is empty
  add("head", 2 * kChunk + 9, "Replicate()", "float32", 2);
  add("first.bias", 100, "Shard(0)", "bfloat16", 0);
  dump.none(1, "first.bias");
  // Most of the total, and another one in its last bits for every order of summation.
  for (int layer = 0; layer < 24; ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    dump.parameter({.name = name,
                    .shape = {60},
                    .dtype = "float64",
                    .mesh = "dp",
                    .placements = {"Shard(0)"},
                    .model_part = (layer * 5) % 3});
    std::vector<double> values;
    for (int i = 0; i < 60; ++i) values.push_back(1e14 * std::sin(1.0 + layer + 0.37 * i));
    dump.tensor(name, std::move(values));
  }
  dump.training("max_grad_norm", "1.0").training("num_label_tokens", "24").training("dp_group_size", "3");
  return dump;
}

struct RunOptions {
  StreamOptions stream;
  Numerics numerics = Numerics::exact;
  bool histograms = false;
};

/// What a run leaves behind but for its output.
struct RunTrace {
  ClipResult result;
  std::uint64_t bytes_read = 0;  ///< by passes
  std::size_t kept = 0;          ///< bytes of device memory, at the end
};

/// Measures, and clips into `out` unless that is empty.
inline RunTrace run_over(const std::filesystem::path& dump, const std::filesystem::path& out, Backend& backend,
                         const RunOptions& options) {
  DumpReader reader(dump);
  const auto comm = make_single_process_communicator();
  ShardStream stream(backend, options.stream);
  Run run{reader, backend, *comm, plan_work(reader.manifest(), comm->size()), stream};
  ClipOptions clip;
  clip.numerics = options.numerics;
  clip.histograms = options.histograms;
  RunTrace trace;
  if (out.empty()) {
    trace.result = scale_grads_and_clip_grad_norm(run, recorded_step(reader.manifest()), clip, nullptr);
  } else {
    DumpWriter writer(reader, out, false);
    trace.result = scale_grads_and_clip_grad_norm(run, recorded_step(reader.manifest()), clip, &writer);
  }
  trace.bytes_read = stream.bytes_read();
  trace.kept = stream.storage().bytes(MemorySpace::device);
  return trace;
}

inline void expect_same_files(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(a)) {
    EXPECT_EQ(file_content(entry.path()), file_content(b / entry.path().filename().string()))
        << entry.path().filename();
    ++files;
  }
  EXPECT_GT(files, 1u);
}

inline void expect_same_results(const ClipResult& a, const ClipResult& b) {
  const auto bits = [](double x) { return std::bit_cast<std::uint64_t>(x); };
  EXPECT_EQ(bits(a.total), bits(b.total));
  EXPECT_EQ(bits(a.total_after.value_or(-1)), bits(b.total_after.value_or(-1)));
  ASSERT_EQ(a.norm->parameters.size(), b.norm->parameters.size());
  for (std::size_t p = 0; p < a.norm->parameters.size(); ++p) {
    const TensorStatistics &x = a.norm->parameters[p].statistics, &y = b.norm->parameters[p].statistics;
    EXPECT_EQ(bits(a.norm->parameters[p].norm), bits(b.norm->parameters[p].norm)) << p;
    EXPECT_EQ(bits(x.mean()), bits(y.mean())) << p;
    EXPECT_EQ(x.elements, y.elements) << p;
    EXPECT_EQ(x.zeros, y.zeros) << p;
    EXPECT_EQ(a.norm->parameters[p].none, b.norm->parameters[p].none) << p;
  }
  ASSERT_EQ(a.norm->reference.totals.size(), b.norm->reference.totals.size());
  for (std::size_t i = 0; i < a.norm->reference.totals.size(); ++i) {
    EXPECT_EQ(bits(a.norm->reference.totals[i].total), bits(b.norm->reference.totals[i].total)) << i;
  }
  EXPECT_EQ(a.norm->findings.size(), b.norm->findings.size());
}

/// Bytes of the dump's shards, of one model part or of all.
inline std::size_t gradient_bytes(const std::filesystem::path& dump, std::optional<std::int64_t> part = {}) {
  DumpReader reader(dump);
  const Manifest& manifest = reader.manifest();
  std::size_t bytes = 0;
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(manifest.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const TaskList list = list_tasks(
      reader, {0, manifest.parameters.size()}, ranks, [](auto, auto) { return ScaleFactors{}; }, part);
  for (const ShardTask& task : list.tasks) bytes += task.shard->elements * size_of(task.shard->dtype);
  return bytes;
}

}  // namespace gradclip::test
