#pragma once
// Names of parameters: the tree of modules in their dots, and short forms that still tell them apart. Pure text.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gradclip {

/// The module that a parameter belongs to: its name without the last part, and of that at most the first `depth` parts.
/// "layers.0.mlp.up.weight": at depth 1 "layers", at 2 "layers.0", without a depth "layers.0.mlp.up". Empty for a
/// parameter of the root. @pre depth is at least 1
[[nodiscard]] std::string_view module_of(std::string_view parameter, std::optional<std::size_t> depth);

/// The texts in `width` columns each, longer ones shortened in the middle. Where that would make some of them equal,
/// these keep the place where they differ first: "model...block_7.mlp...weight". What cannot be told apart in the width
/// stays equal. @pre width >= 5, texts are printable UTF-8
[[nodiscard]] std::vector<std::string> shortened_apart(const std::vector<std::string>& texts, std::size_t width);

}  // namespace gradclip
