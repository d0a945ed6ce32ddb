#pragma once
// What the tensors of a merged dump are: their names, shapes and types, which is known before any value is read.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/analysis/block_exchange.hpp"
#include "gradclip/analysis/compared_pair.hpp"
#include "gradclip/stream/task_list.hpp"

namespace gradclip {

enum class MergeFormat : std::uint8_t {
  dump,         ///< an unsharded dump: one rank, one dataset for each parameter
  safetensors,  ///< one file
};

/// One parameter entry of the input, and the full tensor that becomes of it.
struct MergedTensor {
  std::string name;                ///< in the output, unique there if that is a safetensors file
  std::string dataset;             ///< link in the output's rank file, if that is a dump
  ComparedTensor tensor;           ///< of the input
  DType dtype = DType::float32;    ///< as written
  std::optional<float> scale_inv;  ///< as written beside float8
  bool none = false;               ///< the gradient is None on every rank
  /// safetensors: the tensor of the same name and tied weight that is written in its place, an index.
  std::optional<std::size_t> stand_in;

  [[nodiscard]] bool written() const noexcept { return !none && !stand_in; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return written() ? tensor.elements * size_of(dtype) : 0; }
};

struct MergePlan {
  std::vector<MergedTensor> tensors;  ///< in model order
  std::vector<NoneShard> none;        ///< this process's recorded ranks' gradients that are None; index of tensor
};

/// Finds all shards of the parameters and settles what becomes of them. A type stays; but float8 of which shards have
/// different scale_inv, or of which addends are to be combined, becomes float32, its values' type, and so does float8
/// with a scale_inv in a safetensors file, which has no place for one. Entries of one name get names (safetensors,
/// "name@2") or datasets (dump) of their own. Collective.
/// @param only  null: all
/// Errors: Error(usage) where `only` matches nothing; as RankFile::locate.
[[nodiscard]] MergePlan plan_merge(DiffRun& run, const NamePattern* only, MergeFormat format);

}  // namespace gradclip
