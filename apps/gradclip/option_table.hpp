#pragma once
// Every option and every command, each in one place: what the command line, the environment, the config file, the help,
// shell completion and the manual are made of.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "command_list.hpp"
#include "options.hpp"

namespace gradclip {

/// Where a value came from, strongest first.
enum class Level : std::uint8_t { command_line, environment, config };

struct Value {
  std::string text;
  std::string origin;  ///< "--max-norm", "GRADCLIP_MAX_NORM", "'max-norm' in config file 'run.json'"
  Level level = Level::command_line;
};

/// Throws Error(usage): a value that an option does not take.
[[noreturn]] void refuse(const Value& value, std::string expected, std::string advice = {});
/// Throws Error(usage): options that contradict each other, each by where it came from.
[[noreturn]] void refuse_both(const Value& a, const Value& b);
/// Errors: as refuse().
[[nodiscard]] bool boolean(const Value& value);

enum class Kind : std::uint8_t { value, flag, toggle };  // a toggle has an opposite, --no-NAME
enum class Section : std::uint8_t { command, scale, common };

constexpr unsigned kClip = 1, kNorms = 2, kInspect = 4, kDoctor = 8, kVerify = 16, kDiff = 32, kCheck = 64,
                   kMerge = 128, kSynth = 256, kReport = 512, kTokens = 1024, kAccumulate = 2048;
constexpr unsigned kAll = ~kReport;                     // that work: report only draws what another found
constexpr unsigned kMeasure = kClip | kNorms | kCheck;  // the scaled norm

struct OptionEntry {
  std::string name;
  Kind kind;
  Section section;
  unsigned commands;  ///< that take it
  std::string metavar;
  std::string help;
  std::function<void(CommandLine&, const Value&)> apply;
};

/// Every option but DUMP, --config, --help and --version.
[[nodiscard]] std::vector<OptionEntry> make_table();

struct CommandEntry {
  std::string_view name;
  Command command;
  unsigned bit;
  bool takes_dump;
  std::string_view usage;
  std::string_view summary;
  std::string_view description;
};

[[nodiscard]] std::span<const CommandEntry> command_table();

/// What every command answers by itself.
[[nodiscard]] const std::vector<OptionDescription>& universal_options();

}  // namespace gradclip
