#pragma once
// How one mesh dimension splits, copies or adds up a tensor.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/base/element.hpp"

namespace gradclip {

struct Placement {
  enum class Kind : std::uint8_t { shard, strided_shard, replicate, partial, flat };

  Kind kind = Kind::replicate;
  std::int64_t dim = 0;                                ///< shard, strided_shard: tensor dimension
  std::int64_t split_factor = 1;                       ///< strided_shard
  PartialOperation operation = PartialOperation::sum;  ///< partial

  friend bool operator==(const Placement&, const Placement&) = default;
};

/// Reads any spelling that PyTorch has printed: Shard(0), Shard(dim=0), S(0); Replicate(), R; Partial(), Partial(sum),
/// P, P(sum); _StridedShard(dim=0, sf=2), _StridedShard(0, split_factor=2), _S(0, 2); and Flat(). White space is free;
/// one pair of parentheses or brackets around it may hold a trailing comma; a reduction may be quoted or named
/// reduce_op; _Partial is Partial's old name; the module's name may come first. A negative dimension counts from the
/// end and is resolved against `tensor_dimensions`. Errors: Error(bad_input) with the text, what was expected there and
/// the known spellings.
[[nodiscard]] Placement parse_placement(std::string_view text, std::size_t tensor_dimensions);

/// The first spelling of each kind in the list above, operation always written: "Shard(0)", "Partial(sum)",
/// "_StridedShard(dim=0, sf=2)".
[[nodiscard]] std::string to_string(const Placement& placement);
[[nodiscard]] std::string to_string(const std::vector<Placement>& placements);  ///< "[Shard(0), Replicate()]"

[[nodiscard]] std::string_view name(PartialOperation operation) noexcept;

}  // namespace gradclip
