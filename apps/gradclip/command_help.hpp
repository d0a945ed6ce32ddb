#pragma once
// What --help and --version print.

#include <string>
#include <vector>

#include "option_table.hpp"

namespace gradclip {

[[nodiscard]] std::string version_text();
[[nodiscard]] std::string general_help();
/// @param table  make_table()'s
[[nodiscard]] std::string command_help(const CommandEntry& command, const std::vector<OptionEntry>& table);

}  // namespace gradclip
