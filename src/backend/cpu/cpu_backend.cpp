#include "gradclip/backend/cpu/cpu_backend.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

[[noreturn]] void throw_out_of_memory(std::size_t bytes) {
  throw Error(ExitCode::resources,
              {.where = "host memory",
               .found = fmt::format("no room for {} bytes ({:.1f} GiB)", bytes, static_cast<double>(bytes) / (1 << 30)),
               .expected = {},
               .advice = "lower --memory-budget or run fewer processes on this machine"});
}

const ScaleFactors& checked_factors(const ChunkTable& table, const Chunk& chunk) {
  GRADCLIP_CHECK(chunk.count <= kChunkElements, fmt::format("a chunk of {} elements", chunk.count));
  GRADCLIP_CHECK(chunk.factors < table.factors.size(),
                 fmt::format("factors {} of {}", chunk.factors, table.factors.size()));
  return table.factors[chunk.factors];
}

}  // namespace

BackendDescription CpuBackend::describe() const {
  return {.device = "cpu",
          .detail = fmt::format("{} kernels", kernels_.name),
          .working_space = MemorySpace::host,
          .identity = {}};
}

Buffer CpuBackend::allocate(std::size_t bytes, MemorySpace space) {
  GRADCLIP_CHECK(space != MemorySpace::device, "device memory asked of the CPU backend");
  if (bytes == 0) return Buffer({nullptr, 0, space}, [](Bytes) {});
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const std::size_t size = (bytes + alignment - 1) / alignment * alignment;
  void* data = size < bytes ? nullptr : std::aligned_alloc(alignment, size);
  if (data == nullptr) throw_out_of_memory(bytes);
  if (alignment == kHugePage) madvise(data, size, MADV_HUGEPAGE);  // advice: it may fail
  return Buffer({static_cast<std::byte*>(data), bytes, space}, [](Bytes owned) { std::free(owned.data); });
}

void CpuBackend::move(Bytes from, Bytes to) {
  GRADCLIP_CHECK(from.size == to.size, fmt::format("{} bytes to move into {}", from.size, to.size));
  if (from.size > 0) std::memcpy(to.data, from.data, from.size);
}

void CpuBackend::statistics(const ChunkTable& table, const StatisticsRequest& request, Bytes out) {
  GRADCLIP_CHECK(out.size == table.chunks.size() * sizeof(ChunkStatistics),
                 fmt::format("{} bytes for results", out.size));
  for (std::size_t i = 0; i < table.chunks.size(); ++i) {
    const Chunk& chunk = table.chunks[i];
    const ChunkStatistics result = chunk_statistics(kernels_, chunk, checked_factors(table, chunk), request);
    std::memcpy(out.data + i * sizeof result, &result, sizeof result);
  }
}

void CpuBackend::scale(const ChunkTable& table) {
  for (const Chunk& chunk : table.chunks) scale_chunk(kernels_, chunk, checked_factors(table, chunk));
}

void CpuBackend::combine(std::span<const ChunkTable> addends, PartialOperation operation, double divisor, Bytes out) {
  GRADCLIP_CHECK(!addends.empty(), "nothing to combine");
  std::vector<double> combined(kChunkElements);
  std::vector<double> addend(kChunkElements);
  std::size_t written = 0;
  for (std::size_t i = 0; i < addends[0].chunks.size(); ++i) {
    const std::size_t count = addends[0].chunks[i].count;
    for (std::size_t rank = 0; rank < addends.size(); ++rank) {
      GRADCLIP_CHECK(i < addends[rank].chunks.size() && addends[rank].chunks[i].count == count,
                     "addends of unequal shape");
      const Chunk& chunk = addends[rank].chunks[i];
      const ScaleFactors& factors = checked_factors(addends[rank], chunk);
      widen_chunk(kernels_, chunk, factors, rank == 0 ? combined.data() : addend.data());
      if (rank == 0) continue;
      for (std::size_t j = 0; j < count; ++j) combined[j] = combine_values(operation, combined[j], addend[j]);
    }
    for (std::size_t j = 0; j < count; ++j) combined[j] = finish_combination(operation, combined[j], divisor);
    GRADCLIP_CHECK(written + count * sizeof(double) <= out.size, fmt::format("{} bytes for results", out.size));
    if (count > 0) std::memcpy(out.data + written, combined.data(), count * sizeof(double));
    written += count * sizeof(double);
  }
  GRADCLIP_CHECK(written == out.size, fmt::format("{} bytes for {} bytes of results", out.size, written));
}

void CpuBackend::accumulate(std::span<const Chunk> into, const ChunkTable& from, AccumulateStep step) {
  GRADCLIP_CHECK(into.size() == from.chunks.size(), fmt::format("{} chunks into {}", from.chunks.size(), into.size()));
  for (std::size_t i = 0; i < into.size(); ++i) {
    GRADCLIP_CHECK(into[i].count == from.chunks[i].count, "chunks of unequal shape");
    cpu::accumulate_chunk(into[i], from.chunks[i], checked_factors(from, from.chunks[i]), step == AccumulateStep::add);
  }
}

std::unique_ptr<Backend> make_cpu_backend() {
  const char* name = std::getenv("GRADCLIP_CPU_KERNELS");
  return std::make_unique<CpuBackend>(cpu::choose_kernels(name == nullptr ? "" : name));
}

}  // namespace gradclip
