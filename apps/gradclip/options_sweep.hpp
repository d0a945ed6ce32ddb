#pragma once
// What only `norms --sweep` takes.

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

namespace gradclip {

/// The most max_norms of one sweep.
inline constexpr std::size_t kMostMaxNorms = 1000;

/// "0.1:10", a geometric range, both ends in it, with four numbers for each factor of ten or with so many as a third
/// number says ("0.1:10:5"); or a list "0.5,1,2", in its order, of numbers of at least 0, or inf. Empty for anything
/// else.
[[nodiscard]] std::optional<std::vector<double>> parse_sweep(std::string_view text);

}  // namespace gradclip
