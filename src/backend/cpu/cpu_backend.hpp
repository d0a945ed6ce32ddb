#pragma once
// The backend that every machine has.

#include <memory>

#include "gradclip/backend/backend.hpp"
#include "gradclip/backend/cpu/kernels.hpp"

namespace gradclip {

/// Works in the calling thread, at once; several threads calling it work in parallel. Host and pinned memory are the
/// same to it, and it has no device memory.
class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const cpu::Kernels& kernels) : kernels_(kernels) {}

  [[nodiscard]] BackendDescription describe() const override;

  /// Aligned to 64 bytes, large ones to 2 MiB and in huge pages where the system has them: first touch is dear.
  [[nodiscard]] Buffer allocate(std::size_t bytes, MemorySpace space) override;

  void move(Bytes from, Bytes to) override;
  void statistics(const ChunkTable& table, const StatisticsRequest& request, Bytes out) override;
  void scale(const ChunkTable& table) override;
  void wait(UnusedMemory) override {}
  void combine(std::span<const ChunkTable> addends, PartialOperation operation, double divisor, Bytes out) override;
  void accumulate(std::span<const Chunk> into, const ChunkTable& from, AccumulateStep step) override;

 private:
  const cpu::Kernels& kernels_;
};

/// With the best kernels of this processor, or those that the environment variable GRADCLIP_CPU_KERNELS names.
/// @throws Error usage for a name that is unknown or that this processor cannot run.
[[nodiscard]] std::unique_ptr<Backend> make_cpu_backend();

}  // namespace gradclip
