#pragma once
// Environment variables whose names are almost those of options.

#include <string>
#include <string_view>
#include <vector>

namespace gradclip {

/// What variables that are options' begin with.
inline constexpr std::string_view kVariables = "GRADCLIP_";

/// Names of the process's variables that begin so and are set to something, in order.
[[nodiscard]] std::vector<std::string> process_variables(std::string_view prefix);

/// Warnings: which of these variables, each of which begins with kVariables, set nothing.
[[nodiscard]] std::vector<std::string> variables_without_option(const std::vector<std::string>& names);

}  // namespace gradclip
