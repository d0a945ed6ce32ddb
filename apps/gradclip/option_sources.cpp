#include "option_sources.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/text_file.hpp"
#include "suggestions.hpp"
#include "variables.hpp"

namespace gradclip {
namespace {

/// Variables that are no options: this program's others (docs/command-line.md), and those of its tests.
constexpr std::string_view kOtherVariables[] = {"GRADCLIP_CONFIG", "GRADCLIP_CPU_KERNELS", "GRADCLIP_NCCL_TIMEOUT",
                                                "GRADCLIP_BIN",    "GRADCLIP_BUILD",       "GRADCLIP_KEEP",
                                                "GRADCLIP_LONG",   "GRADCLIP_SEED"};
constexpr std::string_view kOtherFamilies[] = {"GRADCLIP_EMULATION_", "GRADCLIP_CONFORMANCE_", "GRADCLIP_TEST_"};

/// Names as they are typed, without dashes: "pp" and "no-pp".
void add_names(std::vector<std::string>& names, const OptionEntry& option) {
  names.push_back(option.name);
  if (option.kind == Kind::toggle) names.push_back("no-" + option.name);
}

/// "--max-norm" for "--max-nrom=1"; empty for what is no option, and where none is near.
std::string meant_option(std::string_view word, const CommandEntry& command, const std::vector<OptionEntry>& table) {
  const std::size_t name = word.find_first_not_of('-');
  if (name == 0 || name == std::string_view::npos) return {};
  std::vector<std::string> names;
  for (const OptionEntry& option : table) {
    if ((option.commands & command.bit) != 0) add_names(names, option);
  }
  for (const OptionDescription& option : universal_options()) names.push_back(option.name);
  const std::string nearest = nearest_name(word.substr(name, word.find('=') - name), names);
  return nearest.empty() ? nearest : "--" + nearest;
}

/// Whether it is an option, of commands that are not this one. @pre the command does not take it
bool is_of_others(std::string_view word, const std::vector<OptionEntry>& table) {
  if (!word.starts_with("--")) return false;
  std::vector<std::string> names;
  for (const OptionEntry& option : table) add_names(names, option);
  return std::find(names.begin(), names.end(), word.substr(2, word.find('=') - 2)) != names.end();
}

/// Adds values of a weaker source: those already there stay. `find` gives a spelled option's value in that source.
void add_values(Values& values, const std::vector<OptionEntry>& table, unsigned commands,
                const std::function<std::optional<Value>(const std::string& name)>& find) {
  for (const OptionEntry& option : table) {
    if ((option.commands & commands) == 0) continue;
    std::optional<Value> value = find(option.name);
    if (option.kind == Kind::toggle) {
      std::optional<Value> opposite = find("no-" + option.name);
      if (value && opposite) refuse_both(*value, *opposite);
      if (opposite) {
        opposite->text = boolean(*opposite) ? "false" : "true";
        value = opposite;
      }
    }
    if (value) values.emplace(option.name, std::move(*value));
  }
}

std::string environment_name(std::string_view option) {
  std::string name(kVariables);
  for (const char c : option) name += c == '-' ? '_' : static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return name;
}

[[noreturn]] void refuse_config(const std::string& where, std::string found, std::string expected,
                                std::string advice = {}) {
  throw Error(
      ExitCode::usage,
      {.where = where, .found = std::move(found), .expected = std::move(expected), .advice = std::move(advice)});
}

nlohmann::json read_config(const std::string& path) {
  const std::string where = "config file " + gradclip::quoted(path);
  const std::string text = read_text_file(path, where, ExitCode::usage);
  try {
    return parse_json(text, where).root;
  } catch (const Error& error) {
    throw Error(ExitCode::usage, error.text());
  }
}

}  // namespace

void refuse_command_line(const std::string& found, std::string_view command, const std::string& meant) {
  const std::string help = command.empty() ? "see gradclip --help" : fmt::format("see gradclip {} --help", command);
  throw Error(ExitCode::usage, {.where = "command line",
                                .found = found,
                                .expected = {},
                                .advice = meant.empty() ? help : fmt::format("did you mean {}? Else {}", meant, help)});
}

Arguments read_command_line(const CommandEntry& command, const std::vector<OptionEntry>& table,
                            std::vector<std::string> words) {
  Arguments arguments;
  CLI::App app;
  app.set_help_flag("-h,--help");
  app.add_flag("--version", arguments.version);
  if (command.takes_dump) app.add_option("DUMP", arguments.dump);
  if ((command.bit & (kNorms | kAccumulate)) != 0) app.add_option("MORE", arguments.more_dumps);
  if (command.command == Command::diff) app.add_option("B", arguments.other);
  std::string config;
  CLI::Option* config_option = app.add_option("--config", config)->take_last();
  std::map<std::string, std::pair<CLI::Option*, std::string>> texts;
  std::map<std::string, std::pair<CLI::Option*, bool>> switches;
  for (const OptionEntry& option : table) {
    if ((option.commands & command.bit) == 0) continue;
    if (option.kind == Kind::value) {
      auto& [handle, text] = texts[option.name];
      handle = app.add_option(option.name == "output" ? "-o,--output" : "--" + option.name, text)->take_last();
    } else {
      auto& [handle, on] = switches[option.name];
      handle = app.add_flag("--" + option.name + (option.kind == Kind::toggle ? ",!--no-" + option.name : ""), on);
    }
  }
  try {
    std::reverse(words.begin(), words.end());
    app.parse(std::move(words));
  } catch (const CLI::CallForHelp&) {
    arguments.help = true;
    return arguments;
  } catch (const CLI::ExtrasError& error) {
    std::string meant;
    for (const std::string& word : app.remaining()) {
      if (is_of_others(word, table)) {
        refuse_command_line(fmt::format("{} has no use for {}", command.name, printable(word)), command.name);
      }
      if (meant.empty()) meant = meant_option(word, command, table);
    }
    refuse_command_line(error.what(), command.name, meant);
  } catch (const CLI::ParseError& error) {
    refuse_command_line(error.what(), command.name);
  }
  for (const auto& [name, option] : texts) {
    if (option.first->count() != 0) arguments.values[name] = {option.second, "--" + name, Level::command_line};
  }
  for (const auto& [name, option] : switches) {
    if (option.first->count() == 0) continue;
    arguments.values[name] = {option.second ? "true" : "false", "--" + name, Level::command_line};
  }
  if (config_option->count() != 0) arguments.config = config;
  return arguments;
}

void add_environment(Values& values, const std::vector<OptionEntry>& table, unsigned commands,
                     const Environment& environment) {
  add_values(values, table, commands, [&](const std::string& option) -> std::optional<Value> {
    const std::string name = environment_name(option);
    const char* text = environment(name.c_str());
    if (text == nullptr || *text == '\0') return std::nullopt;
    return Value{text, name, Level::environment};
  });
}

void add_config(Values& values, const std::vector<OptionEntry>& table, unsigned commands, const std::string& path) {
  const nlohmann::json config = read_config(path);
  const auto origin = [&](const std::string& key) {
    return gradclip::quoted(key) + " in config file " + gradclip::quoted(path);
  };
  // A file may serve several commands: keys of any of them are known.
  std::vector<std::string> known;
  for (const OptionEntry& option : table) add_names(known, option);
  for (const auto& [key, value] : config.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      const std::string meant = nearest_name(key, known);
      refuse_config(origin(key), "no such option", "the long name of an option, without dashes before it",
                    meant.empty() ? "see gradclip COMMAND --help" : fmt::format("did you mean {}?", meant));
    }
    if (value.is_null() || value.is_structured())
      refuse_config(origin(key), value.type_name(), "text, a number, true or false");
  }
  add_values(values, table, commands, [&](const std::string& option) -> std::optional<Value> {
    const auto entry = config.find(option);
    if (entry == config.end()) return std::nullopt;
    return Value{entry->is_string() ? entry->get<std::string>() : entry->dump(), origin(option), Level::config};
  });
}

std::vector<std::string> variables_without_option(const std::vector<std::string>& names) {
  std::vector<std::string> known;
  for (const OptionEntry& option : make_table()) add_names(known, option);
  for (std::string& name : known) name = environment_name(name);
  known.insert(known.end(), std::begin(kOtherVariables), std::end(kOtherVariables));
  std::vector<std::string> endings;  // what tells them apart
  for (const std::string& name : known) endings.push_back(name.substr(kVariables.size()));
  std::vector<std::string> warnings;
  for (const std::string& name : names) {
    const bool other = std::any_of(std::begin(kOtherFamilies), std::end(kOtherFamilies),
                                   [&](std::string_view family) { return name.starts_with(family); });
    if (other || std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string meant = nearest_name(std::string_view(name).substr(kVariables.size()), endings);
    warnings.push_back(fmt::format("the environment variable {} is no option's{}", printable(name),
                                   meant.empty() ? "" : fmt::format("; did you mean {}{}?", kVariables, meant)));
  }
  return warnings;
}

std::string cli11_version() {
  return CLI11_VERSION;
}

}  // namespace gradclip
