#include "command_help.hpp"

#include <fmt/format.h>

#include <string_view>

#include "command_list.hpp"
#include "gradclip/base/dtype.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/synth/model.hpp"

namespace gradclip {
namespace {

constexpr std::string_view kSources =
    "Options also come from the environment (GRADCLIP_MAX_NORM=1 for --max-norm 1) and from --config;\n"
    "the command line beats the environment, which beats the file, which beats the dump's manifest.\n\n";

std::string exit_codes(std::string_view one) {
  return fmt::format(
      "Exit codes: 0 done, {}2 usage, 3 bad input, 4 non-finite total refused,\n"
      "            5 resources, 70 a bug in gradclip\n",
      one);
}

/// What exit code 1 of a command means; empty where it has none.
std::string_view exit_code_one(const CommandEntry& command) {
  if ((command.bit & (kVerify | kDiff | kCheck)) != 0) return "1 findings, ";
  if ((command.bit & (kInspect | kSynth | kReport | kDoctor)) != 0) return "";
  if (command.bit == kAccumulate) return "1 findings (--strict) or differences (--check), ";
  return "1 findings (--strict), ";
}

std::string spelling(const OptionEntry& option) {
  std::string text = option.name == "output" ? "-o, --output" : "--" + option.name;
  if (option.kind == Kind::toggle) text += ", --no-" + option.name;
  if (!option.metavar.empty()) text += ' ' + option.metavar;
  return text;
}

/// The values that an option takes by name. They stand in one place, and its refusal of any other value lists them.
std::vector<std::string> choices_of(const OptionEntry& option, const CommandEntry& command) {
  constexpr std::string_view kOneOf = "one of ", kComma = ", ";
  std::vector<std::string> choices;
  if (option.kind != Kind::value) return choices;
  if (option.name == "model") {
    for (const BuiltinModel& model : builtin_models()) choices.push_back(model.name);
    return choices;
  }
  try {
    CommandLine scratch;
    option.apply(scratch, {"?", "--" + option.name, Level::command_line});
  } catch (const Error& error) {
    std::string_view names = error.text().expected;
    if (!names.starts_with(kOneOf)) return choices;
    names.remove_prefix(kOneOf.size());
    for (std::size_t end; (end = names.find(kComma)) != std::string_view::npos;) {
      choices.emplace_back(names.substr(0, end));
      names.remove_prefix(end + kComma.size());
    }
    choices.emplace_back(names);
  }
  if (option.name == "dtype" && command.bit == kAccumulate) {
    std::erase_if(choices, [](const std::string& name) { return size_of(*parse_dtype(name)) == 1; });
  }
  return choices;
}

}  // namespace

std::string version_text() {
  return "gradclip " GRADCLIP_VERSION "\n";
}

std::string general_help() {
  std::string text =
      "Clips, checks and explains recorded sharded gradients.\n\n"
      "Usage: gradclip COMMAND DUMP [options]                one process\n"
      "       mpirun -np N gradclip COMMAND DUMP [options]   several: the same output, the same bits\n\n"
      "Commands\n";
  for (const CommandEntry& command : command_table())
    text += fmt::format("  {:<10}  {}\n", command.name, command.summary);
  text +=
      "\n  gradclip help COMMAND      the command's options; so does gradclip COMMAND --help\n  gradclip --version\n"
      "  gradclip --print-completion bash|zsh|fish\n"
      "  gradclip --print-man\n\n";
  return text + std::string(kSources) + exit_codes("1 findings (of most commands with --strict), ");
}

std::string command_help(const CommandEntry& command, const std::vector<OptionEntry>& table) {
  constexpr std::size_t kWidth = 28;
  std::string text = fmt::format("Usage: gradclip {}\n\n{}\n", command.usage, command.description);
  const auto entry = [&](const std::string& left, const std::string& help) {
    text += left.size() <= kWidth ? fmt::format("  {:<{}}  {}\n", left, kWidth, help)
                                  : fmt::format("  {}\n  {:<{}}  {}\n", left, "", kWidth, help);
  };
  const auto section = [&](Section which, std::string_view title) {
    bool first = true;
    for (const OptionEntry& option : table) {
      if (option.section != which || (option.commands & command.bit) == 0) continue;
      if (first && !title.empty()) text += fmt::format("\n{}\n", title);
      first = false;
      entry(spelling(option), option.help);
    }
  };
  if (command.takes_dump) {
    text += '\n';
    if (command.bit == kReport) {
      entry("FILE.json", "a report");
    } else {
      entry(command.bit == kDiff ? "A, B" : "DUMP", "directory with manifest.json and rank files");
    }
  }
  section(Section::command, {});
  section(Section::scale, "Scaling and clipping (default: what the dump recorded)");
  section(Section::common, "Common");
  for (const OptionDescription& option : universal_options()) {
    entry((option.letter.empty() ? "" : "-" + option.letter + ", ") + "--" + option.name +
              (option.metavar.empty() ? "" : " " + option.metavar),
          option.help);
  }
  return text + '\n' + std::string(kSources) + exit_codes(exit_code_one(command));
}

std::vector<CommandDescription> describe_commands() {
  const std::vector<OptionEntry> table = make_table();
  std::vector<CommandDescription> commands;
  for (const CommandEntry& command : command_table()) {
    CommandDescription& described = commands.emplace_back();
    described.name = command.name;
    described.usage = command.usage;
    described.summary = command.summary;
    described.description = command.description;
    described.takes_dump = command.takes_dump;
    for (const OptionEntry& option : table) {
      if ((option.commands & command.bit) == 0) continue;
      described.options.push_back({option.name, option.name == "output" ? "o" : "", option.metavar, option.help,
                                   option.kind == Kind::toggle, option.section == Section::scale,
                                   option.section == Section::common, choices_of(option, command)});
    }
    described.options.insert(described.options.end(), universal_options().begin(), universal_options().end());
  }
  return commands;
}

}  // namespace gradclip
