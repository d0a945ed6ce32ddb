#pragma once
// What there is on the command line, as plain data: what shell completion and the manual page are made of.

#include <string>
#include <string_view>
#include <vector>

namespace gradclip {

struct OptionDescription {
  std::string name = {};     ///< long, without dashes
  std::string letter = {};   ///< "o" for -o; empty: none
  std::string metavar = {};  ///< empty: takes no value
  std::string help = {};
  bool toggle = false;                    ///< has an opposite, --no-NAME
  bool scale = false;                     ///< of scaling and clipping
  bool common = false;                    ///< of every command's kind
  std::vector<std::string> choices = {};  ///< the only values, or those beside a path; empty: any

  [[nodiscard]] bool takes_value() const noexcept { return !metavar.empty(); }
  /// Whether a value is a path.
  [[nodiscard]] bool takes_path() const noexcept {
    return metavar.starts_with("FILE") || metavar == "OUT" || metavar == "MODEL";
  }
};

struct CommandDescription {
  std::string name;
  std::string usage;
  std::string summary;      ///< one line
  std::string description;  ///< sentences, with line breaks
  bool takes_dump = false;
  std::vector<OptionDescription> options;  ///< --config, --version and --help among them
};

/// Every command with every option that it takes, from the definitions that the command line is read by.
[[nodiscard]] std::vector<CommandDescription> describe_commands();

/// A script that completes `gradclip` in a shell. @pre shell is "bash", "zsh" or "fish"
[[nodiscard]] std::string completion_script(std::string_view shell);

/// gradclip.1, as man reads it.
[[nodiscard]] std::string manual_page();

}  // namespace gradclip
