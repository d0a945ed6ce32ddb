#pragma once
// What every backend must give, written for reading and not for speed, and without a line of base/element.hpp: numbers
// are decoded from their fields, rounded by search among all numbers of the type, summed lane by lane.

#include <cstdint>
#include <span>

#include "gradclip/backend/backend.hpp"

namespace gradclip::reference {

/// The number that the bits of a type stand for; every NaN is the same.
[[nodiscard]] double decode(DType dtype, std::uint64_t bits);

/// The bits of the number of the type that is nearest to x, the even one of two; `x` is a float for all types but
/// float64.
[[nodiscard]] std::uint64_t encode(DType dtype, double x);

/// Whether the bits are a subnormal number of the type.
[[nodiscard]] bool is_subnormal(DType dtype, std::uint64_t bits);

/// One element, scaled and clipped.
[[nodiscard]] std::uint64_t scale(DType dtype, std::uint64_t bits, const ScaleFactors& factors);

/// Element i of an array of the type, as bits, and its replacement.
[[nodiscard]] std::uint64_t load(DType dtype, const std::byte* data, std::size_t i);
void store(DType dtype, std::byte* data, std::size_t i, std::uint64_t bits);

class ReferenceBackend final : public Backend {
 public:
  [[nodiscard]] BackendDescription describe() const override;
  [[nodiscard]] Buffer allocate(std::size_t bytes, MemorySpace space) override;
  void move(Bytes from, Bytes to) override;
  void statistics(const ChunkTable& table, const StatisticsRequest& request, Bytes out) override;
  void scale(const ChunkTable& table) override;
  void wait(UnusedMemory) override {}
  void combine(std::span<const ChunkTable> addends, PartialOperation operation, double divisor, Bytes out) override;
  void accumulate(std::span<const Chunk> into, const ChunkTable& from, AccumulateStep step) override;
};

}  // namespace gradclip::reference
