#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "command_list.hpp"

namespace gradclip {
namespace {

/// All spellings of an option.
std::vector<std::string> spellings(const OptionDescription& option) {
  std::vector<std::string> all;
  if (!option.letter.empty()) all.push_back("-" + option.letter);
  all.push_back("--" + option.name);
  if (option.toggle) all.push_back("--no-" + option.name);
  return all;
}

/// In single quotes of a POSIX shell.
std::string shell_quoted(std::string_view text) {
  std::string result = "'";
  for (const char c : text) {
    if (c == '\'') {
      result += "'\\''";
    } else {
      result += c;
    }
  }
  return result + "'";
}

std::string replaced(std::string text, std::string_view what, std::string_view by) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size()) {
    text.replace(at, what.size(), by);
  }
  return text;
}

std::vector<std::string> names_of(const std::vector<CommandDescription>& commands) {
  std::vector<std::string> names;
  for (const CommandDescription& command : commands) names.push_back(command.name);
  return names;
}

struct ValueOption {
  OptionDescription option;
  std::string command;  ///< '*': all of which no entry before says otherwise
};

/// Options that take a value, of any command; the first of a name stands for all that take the same values.
std::vector<ValueOption> with_values(const std::vector<CommandDescription>& commands) {
  std::vector<ValueOption> all, others;
  for (const CommandDescription& command : commands) {
    for (const OptionDescription& option : command.options) {
      if (!option.takes_value()) continue;
      const auto known =
          std::find_if(all.begin(), all.end(), [&](const ValueOption& one) { return one.option.name == option.name; });
      if (known == all.end()) {
        all.push_back({option, "*"});
      } else if (known->option.choices != option.choices) {
        others.push_back({option, command.name});
      }
    }
  }
  others.insert(others.end(), all.begin(), all.end());
  return others;
}

std::string bash(const std::vector<CommandDescription>& commands) {
  std::string values, options;
  for (const auto& [option, command] : with_values(commands)) {
    const std::string pattern = command + ':' + fmt::format("{}", fmt::join(spellings(option), '|' + command + ':'));
    const std::string choices = fmt::format("{}", fmt::join(option.choices, " "));
    if (!choices.empty() && option.takes_path()) {
      values += fmt::format(
          "    {}) compopt -o filenames; COMPREPLY=($(compgen -W '{}' -- \"$word\"))\n"
          "      IFS=$'\\n'; COMPREPLY+=($(compgen -f -- \"$word\")); return ;;\n",
          pattern, choices);
    } else if (!choices.empty()) {
      values += fmt::format("    {}) COMPREPLY=($(compgen -W '{}' -- \"$word\")); return ;;\n", pattern, choices);
    } else if (option.takes_path()) {
      values += fmt::format(
          "    {}) compopt -o filenames; IFS=$'\\n'; COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n", pattern);
    } else {
      values += fmt::format("    {}) return ;;\n", pattern);
    }
  }
  for (const CommandDescription& command : commands) {
    std::vector<std::string> all;
    for (const OptionDescription& option : command.options) {
      for (std::string& spelling : spellings(option)) all.push_back(std::move(spelling));
    }
    options += fmt::format("    {}) options='{}' ;;\n", command.name, fmt::join(all, " "));
  }
  constexpr std::string_view kScript = R"(# bash completion for gradclip

_gradclip() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} options
  local IFS=$' \t\n'
  COMPREPLY=()
  [[ $word == = ]] && word=  # --option=value is three words
  [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W '@COMMANDS@ help --help --version' -- "$word"))
    return
  fi
  case ${COMP_WORDS[1]}:$before in
@VALUES@  esac
  case ${COMP_WORDS[1]} in
@OPTIONS@    help)
      ((COMP_CWORD == 2)) && COMPREPLY=($(compgen -W '@COMMANDS@' -- "$word"))
      return ;;
    *) return ;;
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  else
    IFS=$'\n'
    compopt -o filenames
    COMPREPLY=($(compgen -d -- "$word"))
  fi
}

complete -F _gradclip gradclip
)";
  std::string script(kScript);
  script = replaced(std::move(script), "@COMMANDS@", fmt::format("{}", fmt::join(names_of(commands), " ")));
  script = replaced(std::move(script), "@VALUES@", values);
  return replaced(std::move(script), "@OPTIONS@", options);
}

/// What _arguments and _describe take as text: colons and brackets have a meaning of their own.
std::string zsh_text(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == ':' || c == '[' || c == ']' || c == '\\') result += '\\';
    result += c;
  }
  return result;
}

std::string zsh_option(const OptionDescription& option) {
  std::string value;
  if (option.takes_value()) {
    std::string action;
    if (!option.choices.empty()) action = fmt::format("({})", fmt::join(option.choices, " "));
    if (option.takes_path()) {
      action =
          option.choices.empty() ? "_files" : fmt::format("{{compadd -- {}; _files}}", fmt::join(option.choices, " "));
    }
    value = fmt::format(":{}:{}", zsh_text(option.metavar), action);
  }
  std::string lines;
  for (const std::string& spelling : spellings(option)) {
    lines += "        " + shell_quoted(fmt::format("{}[{}]{}", spelling, zsh_text(option.help), value)) + " \\\n";
  }
  return lines;
}

std::string zsh(const std::vector<CommandDescription>& commands) {
  std::string names, cases;
  for (const CommandDescription& command : commands) {
    names += "    " + shell_quoted(zsh_text(command.name) + ":" + zsh_text(command.summary)) + "\n";
    cases += fmt::format("    {})\n      _arguments -s -S \\\n", command.name);
    for (const OptionDescription& option : command.options) cases += zsh_option(option);
    cases += command.takes_dump ? "        '*:dump:_files -/'\n      ;;\n" : "        && return\n      ;;\n";
  }
  constexpr std::string_view kScript = R"(#compdef gradclip

_gradclip() {
  local -a commands
  commands=(
@COMMANDS@  )
  if ((CURRENT == 2)); then
    _describe 'command' commands
    return
  fi
  local command=$words[2]
  shift words
  ((CURRENT--))
  case $command in
@CASES@    help) _describe 'command' commands ;;
  esac
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _gradclip "$@"
else
  compdef _gradclip gradclip
fi
)";
  std::string script(kScript);
  script = replaced(std::move(script), "@COMMANDS@", names);
  return replaced(std::move(script), "@CASES@", cases);
}

/// In single quotes of fish, where backslashes count.
std::string fish_quoted(std::string_view text) {
  std::string result = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') result += '\\';
    result += c;
  }
  return result + "'";
}

std::string fish(const std::vector<CommandDescription>& commands) {
  std::string script = fmt::format(
      "# fish completion for gradclip\n\nset -l commands {}\n\ncomplete -c gradclip -f\n"
      "complete -c gradclip -n \"not __fish_seen_subcommand_from $commands\" -l help -d 'what there is'\n"
      "complete -c gradclip -n \"not __fish_seen_subcommand_from $commands\" -l version -d 'print the version'\n",
      fmt::join(names_of(commands), " "));
  script += "complete -c gradclip -n __fish_use_subcommand -a help -d 'the options of a command'\n";
  for (const CommandDescription& command : commands) {
    script += fmt::format("complete -c gradclip -n \"not __fish_seen_subcommand_from $commands\" -a {} -d {}\n",
                          command.name, fish_quoted(command.summary));
  }
  for (const CommandDescription& command : commands) {
    const std::string here = fmt::format("complete -c gradclip -n '__fish_seen_subcommand_from {}'", command.name);
    script += '\n';
    if (command.takes_dump) script += here + " -a '(__fish_complete_directories)'\n";
    for (const OptionDescription& option : command.options) {
      std::string value;
      if (option.takes_value()) value = " -x";
      if (!option.choices.empty()) {
        value = fmt::format("{} -a {}", option.takes_path() ? " -r -F" : value,
                            fish_quoted(fmt::format("{}", fmt::join(option.choices, " "))));
      } else if (option.takes_path()) {
        value = " -r -F";
      }
      const std::string letter = option.letter.empty() ? "" : " -s " + option.letter;
      script += fmt::format("{}{} -l {}{} -d {}\n", here, letter, option.name, value, fish_quoted(option.help));
      if (option.toggle) script += fmt::format("{} -l no-{} -d {}\n", here, option.name, fish_quoted(option.help));
    }
  }
  return script;
}

}  // namespace

std::string completion_script(std::string_view shell) {
  const std::vector<CommandDescription> commands = describe_commands();
  if (shell == "bash") return bash(commands);
  return shell == "zsh" ? zsh(commands) : fish(commands);
}

}  // namespace gradclip
