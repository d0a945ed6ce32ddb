#pragma once
// Where the values of options come from, strongest first: the command line, the environment, a config file.

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "machine.hpp"
#include "option_table.hpp"

namespace gradclip {

using Values = std::map<std::string, Value, std::less<>>;  ///< by option name, without "no-"

struct Arguments {
  Values values;
  std::string dump;
  std::vector<std::string> more_dumps;  ///< norms
  std::string other;                    ///< diff
  std::optional<std::string> config;
  bool help = false;
  bool version = false;
};

/// Throws Error(usage): words that no command takes.
/// @param command  empty: none is known yet
/// @param meant    what it probably was meant to be; empty: nobody knows
[[noreturn]] void refuse_command_line(const std::string& found, std::string_view command,
                                      const std::string& meant = {});

/// CLI11 splits the words; values stay text. Errors: refuse_command_line.
[[nodiscard]] Arguments read_command_line(const CommandEntry& command, const std::vector<OptionEntry>& table,
                                          std::vector<std::string> words);

/// Adds values of a weaker source: those already there stay.
/// @param commands  bits of those whose options are looked for
void add_environment(Values& values, const std::vector<OptionEntry>& table, unsigned commands,
                     const Environment& environment);
/// The same from a JSON file. Errors: Error(usage) naming the file and the key.
void add_config(Values& values, const std::vector<OptionEntry>& table, unsigned commands, const std::string& path);

}  // namespace gradclip
