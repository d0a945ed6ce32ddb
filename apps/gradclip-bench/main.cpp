// gradclip-bench: how near the backends come to what memory allows.
//
// Every benchmark works through the same array, in chunks, on the CPU on 1 and 2 threads: a plain sum of its bytes, the
// statistics pass for each type (p = 2, without and with a divisor), a plain copy, scaling in place. Where there is a
// CUDA device, the same there, against a copy within its memory, and transfers (--benchmark_filter=device for those
// alone). Rounds are interleaved, because a shared machine's speed changes by the minute; the table at the end compares
// medians.
//
// The array's size in MiB is --array_mib=N (1024 without it); the rest are Google Benchmark's options.

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks.hpp"
#include "device.hpp"
#include "gradclip/backend/backend.hpp"
#include "gradclip/backend/cuda/cuda_backend.hpp"
#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/error.hpp"

namespace {

using namespace gradclip;
using namespace gradclip::bench;

constexpr std::string_view kSizeOption = "--array_mib=";
constexpr int kThreadCounts[] = {1, 2};

/// What all benchmarks share. Every 16-bit word of the array is a finite, normal number of either sign in each 16-bit
/// type; so are pairs and fours of them in the wider types, and its bytes are finite in float8.
struct Arrays {
  std::unique_ptr<Backend> backend;
  Buffer array;
  Buffer copy;

  explicit Arrays(std::size_t bytes) : backend(make_backend(DeviceChoice::cpu).backend) {
    array = backend->allocate(bytes, MemorySpace::host);
    copy = backend->allocate(bytes, MemorySpace::host);
    std::vector<std::uint16_t> pattern(1 << 20);
    std::mt19937 random(7);
    for (std::uint16_t& word : pattern) {
      word = static_cast<std::uint16_t>(0x3800u + (random() & 0x7FEu) + ((random() & 1u) << 15));
    }
    const std::size_t pattern_bytes = pattern.size() * sizeof pattern[0];
    for (std::size_t at = 0; at < bytes; at += pattern_bytes) {
      std::memcpy(array.data() + at, pattern.data(), std::min(pattern_bytes, bytes - at));
    }
    std::memcpy(copy.data(), array.data(), bytes);
  }
};

/// A thread's part of the array as chunks of one type.
std::vector<Chunk> chunks_of(const Arrays& arrays, DType dtype, const benchmark::State& state) {
  return bench::chunks_of(arrays.array.bytes(), dtype, state.thread_index(), state.threads());
}

#if defined(__has_attribute) && __has_attribute(target_clones)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
std::uint64_t
sum_of_words(const std::uint64_t* words, std::size_t count) {
  std::uint64_t sums[32] = {};
  for (std::size_t i = 0; i + 32 <= count; i += 32) {
    for (std::size_t j = 0; j < 32; ++j) sums[j] += words[i + j];
  }
  for (std::size_t j = 1; j < 32; ++j) sums[0] += sums[j];
  return sums[0];
}

void read_sum(benchmark::State& state, const Arrays& arrays) {
  const std::vector<Chunk> chunks = chunks_of(arrays, DType::float64, state);
  for (auto _ : state) {
    benchmark::DoNotOptimize(sum_of_words(static_cast<const std::uint64_t*>(static_cast<void*>(chunks[0].data)),
                                          bytes_of(chunks) / sizeof(std::uint64_t)));
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(bytes_of(chunks)));
}

void copy(benchmark::State& state, Arrays& arrays) {
  const std::vector<Chunk> chunks = chunks_of(arrays, DType::float64, state);
  const std::size_t offset = static_cast<std::size_t>(chunks[0].data - arrays.array.data());
  for (auto _ : state) {
    std::memcpy(arrays.copy.data() + offset, chunks[0].data, bytes_of(chunks));
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(bytes_of(chunks)));
}

void statistics(benchmark::State& state, const Arrays& arrays, DType dtype, const ScaleFactors& factors) {
  const std::vector<Chunk> chunks = chunks_of(arrays, dtype, state);
  std::vector<ChunkStatistics> results(chunks.size());
  const Bytes out{static_cast<std::byte*>(static_cast<void*>(results.data())), results.size() * sizeof results[0],
                  MemorySpace::host};
  for (auto _ : state) arrays.backend->statistics({chunks, {&factors, 1}}, {}, out);
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(bytes_of(chunks)));
}

void scale(benchmark::State& state, const Arrays& arrays, DType dtype, const ScaleFactors& factors) {
  const std::vector<Chunk> chunks = chunks_of(arrays, dtype, state);
  for (auto _ : state) arrays.backend->scale({chunks, {&factors, 1}});
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(bytes_of(chunks)));
}

/// The plain pass that a benchmark is compared with; none for transfers.
std::string_view peer_of(std::string_view name) {
  if (name.ends_with(" pinned")) return {};
  if (name.starts_with(kDevice)) return kDeviceCopy;
  return name.starts_with("scale") || name == "copy" ? "copy" : "read_sum";
}

/// Prints what Google Benchmark prints, and at the end each median against the plain pass on as many threads.
class RatioReporter : public benchmark::ConsoleReporter {
 public:
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type == Run::RT_Iteration && !run.error_occurred) {
        speeds_[run.run_name.function_name][static_cast<int>(run.threads)].push_back(
            run.counters.at("bytes_per_second"));
      }
    }
    ConsoleReporter::ReportRuns(runs);
  }

  void Finalize() override {
    fmt::print("\n{:<42}", "GB/s (speed over read_sum's or copy's)");
    for (const int threads : kThreadCounts)
      fmt::print("{:>18}", fmt::format("{} thread{}", threads, threads == 1 ? "" : "s"));
    fmt::print("\n");
    for (const auto& [name, by_threads] : speeds_) {
      fmt::print("{:<42}", name);
      for (const auto& [threads, speeds] : by_threads) {
        const double plain = median_of(std::string(peer_of(name)), threads);
        const double speed = median_of(name, threads);
        fmt::print("{:>18}", plain > 0.0 ? fmt::format("{:.1f} ({:.2f})", speed * 1e-9, speed / plain)
                                         : fmt::format("{:.1f}       ", speed * 1e-9));
      }
      fmt::print("\n");
    }
  }

 private:
  /// 0 if it was not run.
  double median_of(const std::string& name, int threads) const {
    const auto by_threads = speeds_.find(name);
    if (by_threads == speeds_.end()) return 0.0;
    const auto found = by_threads->second.find(threads);
    if (found == by_threads->second.end()) return 0.0;
    std::vector<double> speeds = found->second;
    std::sort(speeds.begin(), speeds.end());
    return speeds[speeds.size() / 2];
  }

  std::map<std::string, std::map<int, std::vector<double>>> speeds_;
};

void register_all(Arrays& arrays) {
  static const ScaleFactors none, divide = dividing_factors(), clip = clipping_factors();
  const auto add = [](const std::string& title, auto function) {
    for (const int threads : kThreadCounts) {
      benchmark::RegisterBenchmark(title.c_str(), function)->Threads(threads)->UseRealTime()->Iterations(1);
    }
  };
  add("read_sum", [&](benchmark::State& state) { read_sum(state, arrays); });
  add("copy", [&](benchmark::State& state) { copy(state, arrays); });
  for (const DType dtype : kTypes) {
    const std::string type(name(dtype));
    add("statistics " + type, [&, dtype](benchmark::State& state) { statistics(state, arrays, dtype, none); });
    add("statistics " + type + " divided",
        [&, dtype](benchmark::State& state) { statistics(state, arrays, dtype, divide); });
    add("scale " + type, [&, dtype](benchmark::State& state) { scale(state, arrays, dtype, clip); });
  }
}

int run(int argc, char** argv) {
  std::size_t mebibytes = 1024;
  std::vector<char*> arguments{argv[0]};
  std::string repetitions = "--benchmark_repetitions=7";
  std::string interleaving = "--benchmark_enable_random_interleaving=true";
  std::string aggregates = "--benchmark_report_aggregates_only=false";
  for (std::string* option : {&repetitions, &interleaving, &aggregates}) arguments.push_back(option->data());
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    if (argument.starts_with(kSizeOption)) {
      const std::string_view value = argument.substr(kSizeOption.size());
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), mebibytes);
      if (error != std::errc{} || end != value.data() + value.size() || mebibytes == 0) {
        fmt::print(stderr, "{} takes a number of MiB\n", kSizeOption);
        return static_cast<int>(ExitCode::usage);
      }
    } else {
      arguments.push_back(argv[i]);
    }
  }
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return static_cast<int>(ExitCode::usage);

  Arrays arrays(mebibytes << 20);
  fmt::print("{}, arrays of {} MiB\n", arrays.backend->describe().detail, mebibytes);
  register_all(arrays);
  std::unique_ptr<DeviceArrays> device;
  if (ChosenBackend chosen = try_cuda_backend(0); chosen.backend != nullptr) {
    fmt::print("{}\n", chosen.backend->describe().detail);
    device = std::make_unique<DeviceArrays>(std::move(chosen), arrays.array.bytes());
    register_device_benchmarks(*device);
  } else {
    fmt::print("no device benchmarks: {}\n", chosen.reason);
  }
  RatioReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const gradclip::Error& error) {
    fmt::print(stderr, "gradclip-bench: {}\n", error.what());
    return static_cast<int>(error.code());
  }
}
