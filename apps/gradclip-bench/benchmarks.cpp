#include "benchmarks.hpp"

namespace gradclip::bench {

std::vector<Chunk> chunks_of(Bytes array, DType dtype, int part, int parts) {
  const std::size_t chunks = array.size / size_of(dtype) / kChunkElements;
  const auto begin_of = [&](int i) { return chunks * static_cast<std::size_t>(i) / static_cast<std::size_t>(parts); };
  std::vector<Chunk> result;
  for (std::size_t i = begin_of(part); i < begin_of(part + 1); ++i) {
    result.push_back({array.data + i * kChunkElements * size_of(dtype), kChunkElements, dtype, 0});
  }
  return result;
}

std::size_t bytes_of(const std::vector<Chunk>& chunks) {
  return chunks.empty() ? 0 : chunks.size() * kChunkElements * size_of(chunks[0].dtype);
}

ScaleFactors dividing_factors() {
  ScaleFactors factors;
  factors.steps[0] = ScaleStep::divide;
  factors.numbers[0] = 3.0;
  return factors;
}

ScaleFactors clipping_factors() {
  ScaleFactors factors;
  factors.clip = ClipStep::in_gradient_precision;
  factors.coefficient = -1.0;
  return factors;
}

}  // namespace gradclip::bench
