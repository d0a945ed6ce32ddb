#pragma once
// What the benchmarks of every backend share.

#include <vector>

#include "gradclip/backend/chunk_table.hpp"
#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/memory.hpp"

namespace gradclip::bench {

inline constexpr DType kTypes[] = {DType::float32, DType::bfloat16, DType::float16, DType::float64,
                                   DType::float8_e4m3fn};

/// Part `part` of `parts` of an array as whole chunks of one type.
[[nodiscard]] std::vector<Chunk> chunks_of(Bytes array, DType dtype, int part = 0, int parts = 1);

[[nodiscard]] std::size_t bytes_of(const std::vector<Chunk>& chunks);

/// As a label-token count divides: by no power of two.
[[nodiscard]] ScaleFactors dividing_factors();

/// A clip that leaves numbers of the same size for the next round.
[[nodiscard]] ScaleFactors clipping_factors();

}  // namespace gradclip::bench
