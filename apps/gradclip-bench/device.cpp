#include "device.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "benchmarks.hpp"

namespace gradclip::bench {
namespace {

/// Calls between two waits: a call's way to the device then hides behind the one before it, as in a pass over
/// gradients.
constexpr int kCalls = 10;

constexpr std::size_t kLargestTransfer = std::size_t{256} << 20;

/// Times calls up to the moment when the device has done them.
/// @param bytes  that one call moves through memory
void measure(benchmark::State& state, Backend& backend, std::size_t bytes, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  call();  // the first one allocates
  backend.wait(UnusedMemory::keep);
  for (auto _ : state) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    backend.wait(UnusedMemory::keep);
    state.SetIterationTime(std::chrono::duration<double>(Clock::now() - start).count());
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * kCalls * static_cast<std::int64_t>(bytes));
}

void statistics(benchmark::State& state, const DeviceArrays& arrays, DType dtype, const ScaleFactors& factors) {
  const std::vector<Chunk> chunks = chunks_of(arrays.array(), dtype);
  const Bytes out = arrays.results().subspan(0, chunks.size() * sizeof(ChunkStatistics));
  measure(state, arrays.backend(), bytes_of(chunks), [&] {
    arrays.backend().statistics({chunks, {&factors, 1}}, {}, out);
  });
}

void scale(benchmark::State& state, const DeviceArrays& arrays, DType dtype, const ScaleFactors& factors) {
  const std::vector<Chunk> chunks = chunks_of(arrays.array(), dtype);
  measure(state, arrays.backend(), 2 * bytes_of(chunks), [&] { arrays.backend().scale({chunks, {&factors, 1}}); });
}

void move(benchmark::State& state, const DeviceArrays& arrays, Bytes from, Bytes to, std::size_t bytes) {
  measure(state, arrays.backend(), bytes, [&] { arrays.backend().move(from, to); });
}

}  // namespace

DeviceArrays::DeviceArrays(ChosenBackend chosen, Bytes content) : backend_(std::move(chosen.backend)) {
  array_ = backend_->allocate(content.size, MemorySpace::device);
  copy_ = backend_->allocate(content.size, MemorySpace::device);
  pinned_ = backend_->allocate(std::min(content.size, kLargestTransfer), MemorySpace::pinned);
  results_ = backend_->allocate((content.size / kChunkElements + 1) * sizeof(ChunkStatistics), MemorySpace::device);
  backend_->move(content, array_.bytes());
}

void register_device_benchmarks(DeviceArrays& arrays) {
  static const ScaleFactors none, divide = dividing_factors(), clip = clipping_factors();
  const auto add = [](const std::string& title, auto function) {
    benchmark::RegisterBenchmark((std::string(kDevice) + title).c_str(), function)->UseManualTime()->Iterations(1);
  };
  const std::size_t bytes = arrays.array().size;
  add("copy", [&, bytes](benchmark::State& state) { move(state, arrays, arrays.array(), arrays.copy(), 2 * bytes); });
  for (const DType dtype : kTypes) {
    const std::string type(name(dtype));
    add("statistics " + type, [&, dtype](benchmark::State& state) { statistics(state, arrays, dtype, none); });
    add("statistics " + type + " divided",
        [&, dtype](benchmark::State& state) { statistics(state, arrays, dtype, divide); });
    add("scale " + type, [&, dtype](benchmark::State& state) { scale(state, arrays, dtype, clip); });
  }
  const std::size_t transfer = arrays.pinned().size;
  const Bytes target = arrays.copy().subspan(0, transfer);
  add("from pinned",
      [&, target](benchmark::State& state) { move(state, arrays, arrays.pinned(), target, target.size); });
  add("to pinned", [&, target](benchmark::State& state) { move(state, arrays, target, arrays.pinned(), target.size); });
}

}  // namespace gradclip::bench
