#include "gradclip/analysis/block_values.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gradclip/base/dispatch.hpp"
#include "gradclip/base/element.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/norm/findings.hpp"

namespace gradclip {
namespace {

bool adds(PartialOperation operation) {
  return operation == PartialOperation::sum || operation == PartialOperation::avg;
}

template <class Use>
void for_each_run(const ComparedPiece& piece, const Use& use) {
  std::uint64_t local = 0;
  for (const StridedRun& run : piece.runs) {
    for (std::uint32_t i = 0; i < run.repeats; ++i) {
      use(std::uint64_t{run.offset} + std::uint64_t{i} * run.stride, local, std::uint64_t{run.count});
      local += run.count;
    }
  }
}

std::string where(const BlockSide& side) {
  return side.dump.directory().string() + ", parameter " +
         quoted(side.dump.manifest().parameters[side.tensor.parameter].name);
}

/// A rank whose gradient is None has recorded no slice. Where the placements leave the slices open, what is taken for
/// its own need not go with what the others recorded; its piece, if there is one, may lie in another block.
void refuse_unrecorded_slices(const BlockSide& side, std::span<const ComparedPiece* const> pieces) {
  const Manifest& manifest = side.dump.manifest();
  const ParameterEntry& entry = manifest.parameters[side.tensor.parameter];
  if (!entry.mesh || !slices_are_ambiguous(entry.shape, manifest.meshes[*entry.mesh], entry.layout())) return;
  std::vector<std::int32_t> ranks;
  for (const ComparedPiece* piece : pieces) {
    if (piece->header.none != 0) ranks.push_back(piece->header.rank);
  }
  if (ranks.empty()) {
    for (const std::int32_t rank : manifest.meshes[*entry.mesh].ranks()) {
      if (side.dump.rank_file(rank)->locate(side.tensor.parameter).none) ranks.push_back(rank);
    }
  }
  if (ranks.empty()) return;
  std::sort(ranks.begin(), ranks.end());
  throw Error(ExitCode::bad_input,
              {.where = where(side),
               .found = fmt::format("the gradient is None on {}: no slice was recorded there, and the one that the "
                                    "placements give does not go with those that other ranks recorded",
                                    named_ranks(ranks)),
               .expected = "a gradient on every rank of an uneven _StridedShard, whose slices differ between PyTorch's "
                           "versions",
               .advice = "record zeros there, or leave the parameter out (--only)"});
}

}  // namespace

void copy_values(const std::byte* stored, DType dtype, float scale_inv, std::uint64_t count, std::byte* to) {
  if (!is_float8(dtype)) {
    std::memcpy(to, stored, count * size_of(dtype));
    return;
  }
  with_dtype(dtype, [&]<DType D>() {
    if constexpr (is_float8(D)) {
      for (std::uint64_t i = 0; i < count; ++i) {
        const float value = element_value<D>(static_cast<std::uint8_t>(stored[i]), scale_inv);
        std::memcpy(to + i * sizeof value, &value, sizeof value);
      }
    }
  });
}

const std::byte* BlockAssembly::stored(const BlockSide& side, const ComparedPiece& piece) {
  if (piece.bytes != nullptr) return piece.bytes;
  const std::size_t bytes = piece.header.elements * size_of(side.tensor.dtype);
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  const auto file = side.dump.rank_file(piece.header.rank);
  file->read(file->locate(side.tensor.parameter), piece.first, piece.header.elements, scratch_.data());
  if (side.progress) side.progress(bytes);
  return scratch_.data();
}

void BlockAssembly::check_cover(const BlockSide& side, std::span<const ComparedPiece* const> pieces) {
  std::uint64_t held = 0;
  for (const ComparedPiece* piece : pieces) held += piece->header.elements;
  bool twice = held > side.elements;
  if (!twice && held == side.elements && pieces.size() > 1) {
    covered_.assign(side.elements, 0);
    for (const ComparedPiece* piece : pieces) {
      for_each_run(*piece, [&](std::uint64_t at, std::uint64_t, std::uint64_t count) {
        twice = twice || std::memchr(covered_.data() + at, 1, count) != nullptr;
        std::memset(covered_.data() + at, 1, count);
      });
    }
  }
  if (held == side.elements && !twice) return;
  refuse_unrecorded_slices(side, pieces);
  throw Error(ExitCode::bad_input,
              {.where = where(side),
               .found = twice ? "two ranks hold the same elements by their global_offset or global_ranges"
                              : "no rank holds some of its elements",
               .expected = "shards that hold each element once",
               .advice = "gradclip inspect shows meshes and placements"});
}

void BlockAssembly::assemble_addend(const BlockSide& side, std::uint32_t addend, std::optional<std::uint32_t> copy,
                                    BlockValues& values) {
  std::vector<const ComparedPiece*> pieces, of_one_copy;
  bool any_none = false;
  float largest_scale = 0.0F;
  for (const ComparedPiece& piece : pieces_of(side.pieces, addend, copy)) {
    pieces.push_back(&piece);
    if (piece.header.copy == copy.value_or(0)) of_one_copy.push_back(&piece);
    any_none = any_none || piece.header.none != 0;
    largest_scale = std::max(largest_scale, std::abs(piece.header.scale_inv));
  }
  check_cover(side, of_one_copy);
  // The copy that counts is written last.
  std::sort(pieces.begin(), pieces.end(),
            [](const ComparedPiece* x, const ComparedPiece* y) { return x->header.copy > y->header.copy; });

  const DType stored_as = side.tensor.dtype;
  const bool convert = is_float8(stored_as) && !side.as_stored;
  values.dtype = convert ? DType::float32 : stored_as;
  values.smallest_normal = smallest_normal_of(stored_as) * (is_float8(stored_as) ? double{largest_scale} : 1.0);
  const std::size_t size = size_of(values.dtype);
  values.bytes.resize(side.elements * size);
  values.none.clear();
  if (any_none) {
    values.none.assign(side.elements, 1);
    std::memset(values.bytes.data(), 0, side.elements * size);
  }
  for (const ComparedPiece* piece : pieces) {
    if (piece->header.none != 0) continue;
    const bool whole =
        piece->runs.size() == 1 && piece->runs[0].repeats == 1 && piece->header.elements == side.elements;
    if (whole && piece->bytes == nullptr && !convert) {
      const auto file = side.dump.rank_file(piece->header.rank);
      file->read(file->locate(side.tensor.parameter), piece->first, side.elements, values.bytes.data());
      if (side.progress) side.progress(side.elements * size);
    } else {
      const std::byte* from = stored(side, *piece);
      for_each_run(*piece, [&](std::uint64_t at, std::uint64_t local, std::uint64_t count) {
        const std::byte* elements = from + local * size_of(stored_as);
        std::byte* to = values.bytes.data() + at * size;
        if (convert) {
          copy_values(elements, stored_as, piece->header.scale_inv, count, to);
        } else {
          std::memcpy(to, elements, count * size);
        }
      });
    }
    if (!any_none) continue;
    for_each_run(*piece, [&](std::uint64_t at, std::uint64_t, std::uint64_t count) {
      std::memset(values.none.data() + at, 0, count);
    });
  }
}

void BlockAssembly::reduce(const BlockSide& side, std::optional<std::uint32_t> copy, std::size_t level,
                           std::uint32_t group, Level& result) {
  if (level == 0) {
    assemble_addend(side, group, copy, addend_);
    result.values.resize(side.elements);
    widen_elements(addend_.bytes.data(), addend_.dtype, side.elements, result.values.data());
    result.none = addend_.none;
    const bool any_none = std::find(result.none.begin(), result.none.end(), 1) != result.none.end();
    for (const ReductionStep& step : side.tensor.steps) {
      if (!any_none || adds(step.operation)) continue;
      throw Error(ExitCode::bad_input, {.where = where(side),
                                        .found = "the gradient is None on a rank",
                                        .expected = fmt::format("an addend of Partial({})", name(step.operation)),
                                        .advice = "a missing addend counts as 0 for sum and avg only"});
    }
    if (!any_none) result.none.clear();
    return;
  }
  const ReductionStep& step = side.tensor.steps[level - 1];
  const auto fan_in = static_cast<std::uint32_t>(step.fan_in);
  reduce(side, copy, level - 1, group * fan_in, result);
  Level next;
  for (std::uint32_t i = 1; i < fan_in; ++i) {
    reduce(side, copy, level - 1, group * fan_in + i, next);
    if (result.none.empty() && next.none.empty()) {
      for (std::uint64_t e = 0; e < side.elements; ++e) {
        result.values[e] = combine_values(step.operation, result.values[e], next.values[e]);
      }
      continue;
    }
    if (result.none.empty()) result.none.assign(side.elements, 0);
    for (std::uint64_t e = 0; e < side.elements; ++e) {
      if (!next.none.empty() && next.none[e] != 0) continue;
      const double value = next.values[e];
      result.values[e] = result.none[e] != 0 ? value : combine_values(step.operation, result.values[e], value);
      result.none[e] = 0;
    }
  }
  for (std::uint64_t e = 0; e < side.elements; ++e) {
    if (!result.none.empty() && result.none[e] != 0) continue;
    result.values[e] = finish_combination(step.operation, result.values[e], static_cast<double>(step.fan_in));
  }
}

void BlockAssembly::assemble(const BlockSide& side, std::optional<std::uint32_t> copy, BlockValues& values) {
  if (side.tensor.steps.empty()) {
    assemble_addend(side, 0, copy, values);
    return;
  }
  Level top;
  reduce(side, copy, side.tensor.steps.size(), 0, top);
  values.dtype = DType::float64;
  values.smallest_normal = addend_.smallest_normal;
  values.bytes.resize(side.elements * sizeof(double));
  std::memcpy(values.bytes.data(), top.values.data(), side.elements * sizeof(double));
  values.none = std::move(top.none);
}

}  // namespace gradclip
