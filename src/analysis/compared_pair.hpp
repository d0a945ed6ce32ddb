#pragma once
// Which tensor of one dump is compared with which of the other, and as what.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/analysis/name_map.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/norm/partial_slices.hpp"
#include "gradclip/stream/work_plan.hpp"

namespace gradclip {

/// One manifest entry as one global tensor.
struct ComparedTensor {
  std::size_t parameter = 0;        ///< index into Manifest::parameters
  std::vector<std::int64_t> shape;  ///< distinct plain tensors of several ranks: [ranks, ...], in rank order
  std::uint64_t elements = 0;
  DType dtype = DType::float32;
  bool distinct = false;             ///< a plain tensor of which every rank's is another one
  std::uint32_t copies = 1;          ///< by declaration
  std::uint32_t addends = 1;         ///< of a Partial gradient
  std::vector<ReductionStep> steps;  ///< empty: not Partial
};

/// What a recorded rank's shard is to its tensor.
struct ShardPart {
  std::uint32_t copy = 0;    ///< which copy it belongs to; 0 counts
  std::uint32_t addend = 0;  ///< in coordinate order
  std::uint64_t begin = 0;   ///< where the rank's own tensor begins (distinct ones)
};

enum class PairStatus : std::uint8_t { both, missing, extra, shapes_differ };

struct ComparedPair {
  std::string name;         ///< in A; of an extra one in B
  std::string mapped_name;  ///< in B, where the name map changed it; else empty
  PairStatus status = PairStatus::both;
  std::optional<ComparedTensor> a;
  std::optional<ComparedTensor> b;
  std::vector<std::int64_t> shape;  ///< of the comparison, for indices
};

[[nodiscard]] ComparedTensor compared_tensor(const Manifest& manifest, std::size_t parameter);
/// @pre manifest.holds(entry, rank)
[[nodiscard]] ShardPart shard_part(const Manifest& manifest, const ComparedTensor& tensor, std::int32_t rank);

/// Pairs in A's manifest order, then what only B has in B's. Entries of one name (a weight on several pipeline stages,
/// say) are paired in their order; those that the other dump has no counterpart for with its first. Distinct plain
/// tensors also meet one tensor that is their concatenation along the first dimension.
/// @param only  null: all; else pairs of which it matches one name
/// Errors: Error(usage) for a map that gives two names of A one name.
[[nodiscard]] std::vector<ComparedPair> compared_pairs(const Manifest& a, const Manifest& b, const NameMap& names,
                                                       const NamePattern* only);

/// A recorded rank that is likely to hold the element: exact for plain shards of the first dimension, which need not
/// move then. A function of the manifest alone.
[[nodiscard]] std::int32_t likely_holder(const Manifest& manifest, const ComparedTensor& tensor, std::uint64_t element);

}  // namespace gradclip
