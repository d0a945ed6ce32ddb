// Kernels: their launch, and the blocks of a grid over host threads.

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "block.hpp"
#include "cuda_emulation.hpp"
#include "runtime_call.hpp"
#include "settings.hpp"

namespace emulation {
namespace {

constexpr std::uint64_t kMaximumThreads = 1024;
constexpr std::size_t kMaximumShared = std::size_t{48} << 10;

bool one_block_at_a_time = false;

/// Kept from kernel to kernel: stacks are expensive to make.
std::vector<std::unique_ptr<BlockRunner>>& runners() {
  static auto* const all = new std::vector<std::unique_ptr<BlockRunner>>;
  return *all;
}

void run_grid(const Launch& launch) {
  const std::uint64_t blocks = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  const auto threads =
      one_block_at_a_time ? 1 : static_cast<unsigned>(std::min<std::uint64_t>(settings().threads, blocks));
  while (runners().size() < threads) runners().push_back(std::make_unique<BlockRunner>());
  const auto work = [&](unsigned thread) {
    for (std::uint64_t i = thread; i < blocks; i += threads) {
      runners()[thread]->run(launch, settings().order == 1 ? blocks - 1 - i : i);
    }
  };
  std::vector<std::thread> helpers;
  for (unsigned thread = 1; thread < threads; ++thread) helpers.emplace_back(work, thread);
  work(0);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

bool share_between_blocks() {
  one_block_at_a_time = true;
  return true;
}

cudaError_t launch(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t handle,
                   std::function<void()> body) {
  return runtime_call("launch", [&](Lock&) {
    const auto stream = stream_of(handle);
    if (stream == nullptr || stream->device != current_device()) return cudaErrorInvalidResourceHandle;
    const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
    if (threads == 0 || threads > kMaximumThreads || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
        grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
      return cudaErrorInvalidConfiguration;
    }
    if (shared_bytes > kMaximumShared) return cudaErrorInvalidValue;
    enqueue(stream, [name = std::string(name), grid, block, body = std::move(body), device = stream->device] {
      if (may_execute("kernel", device)) run_grid({name.c_str(), grid, block, &body});
      return true;
    });
    return state_of(stream->device);
  });
}

}  // namespace emulation
