#pragma once
// What a word that nobody knows was probably meant to be.

#include <span>
#include <string>
#include <string_view>

namespace gradclip {

/// The one of `names` from which `word` differs least: letters too many, too few, wrong, or two neighbours swapped, at
/// most one of these for each three letters. Empty: none is so near.
[[nodiscard]] std::string nearest_name(std::string_view word, std::span<const std::string> names);

}  // namespace gradclip
