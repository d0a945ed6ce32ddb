#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "command_list.hpp"

namespace gradclip {
namespace {

/// Text as roff reads it: dashes are those of options, and a line's first character gives no command.
std::string roff(std::string_view text) {
  std::string result;
  bool at_start = true;
  for (const char c : text) {
    if (at_start && (c == '.' || c == '\'')) result += "\\&";
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else {
      result += c;
    }
    at_start = c == '\n';
  }
  return result;
}

/// "--pp, --no-pp", "-o, --output OUT", names in bold.
std::string tag(const OptionDescription& option) {
  std::string text = option.letter.empty() ? "" : fmt::format("\\fB\\-{}\\fR, ", option.letter);
  text += fmt::format("\\fB\\-\\-{}\\fR", roff(option.name));
  if (option.toggle) text += fmt::format(", \\fB\\-\\-no\\-{}\\fR", roff(option.name));
  if (option.takes_value()) text += fmt::format(" \\fI{}\\fR", roff(option.metavar));
  return text;
}

void append_options(std::string& page, const std::vector<OptionDescription>& options,
                    const std::function<bool(const OptionDescription&)>& belongs) {
  for (const OptionDescription& option : options) {
    if (belongs(option)) page += fmt::format(".TP\n{}\n{}.\n", tag(option), roff(option.help));
  }
}

/// Options of a kind, each once, from all commands.
std::vector<OptionDescription> united(const std::vector<CommandDescription>& commands,
                                      const std::function<bool(const OptionDescription&)>& belongs) {
  std::vector<OptionDescription> all;
  for (const CommandDescription& command : commands) {
    for (const OptionDescription& option : command.options) {
      const bool known =
          std::any_of(all.begin(), all.end(), [&](const OptionDescription& o) { return o.name == option.name; });
      if (belongs(option) && !known) all.push_back(option);
    }
  }
  return all;
}

std::string takers(const std::vector<CommandDescription>& commands, const OptionDescription& option) {
  std::string names;
  for (const CommandDescription& command : commands) {
    const bool takes = std::any_of(command.options.begin(), command.options.end(),
                                   [&](const OptionDescription& o) { return o.name == option.name; });
    if (takes) names += (names.empty() ? "" : ", ") + command.name;
  }
  return names;
}

constexpr std::string_view kHead = R"(.SH NAME
gradclip \- clip, check and explain recorded sharded gradients
.SH SYNOPSIS
.B gradclip
.I COMMAND DUMP
.RI [ options ]
.br
.B mpirun \-np
.I N
.B gradclip
.I COMMAND DUMP
.RI [ options ]
.SH DESCRIPTION
.B gradclip
reads dumps: the gradients of one training step, as each rank of the job held them. It forms the total norm of the whole
model, says which total each rank would have used, and writes a clipped dump of the same layout. One process or many give
the same output to the bit.
.SH COMMANDS
)";

constexpr std::string_view kTail = R"(.SH ENVIRONMENT
Every option can be given as a variable: GRADCLIP_MAX_NORM=1 for
.BR \-\-max\-norm\~1 .
The command line beats the environment, which beats the file of
.BR \-\-config ,
which beats what the dump recorded.
.TP
.B GRADCLIP_CONFIG
the file of
.BR \-\-config .
.TP
.B GRADCLIP_CPU_KERNELS
baseline, avx2 or avx512: forces an instruction set.
.SH EXIT STATUS
.TP
.B 0
done
.TP
.B 1
the answer is "differs" or "findings"; findings of other commands with
.B \-\-strict
.TP
.B 2
usage
.TP
.B 3
bad input
.TP
.B 4
a total that is not finite was refused
.TP
.B 5
resources
.TP
.B 70
a bug in gradclip
)";

}  // namespace

std::string manual_page() {
  const std::vector<CommandDescription> commands = describe_commands();
  const auto own = [](const OptionDescription& option) { return !option.scale && !option.common; };
  std::string page = fmt::format(".TH GRADCLIP 1 \"\" \"gradclip {}\" \"User Commands\"\n", GRADCLIP_VERSION);
  page += kHead;
  for (const CommandDescription& command : commands) {
    page += fmt::format(".SS gradclip {}\n{}\n", roff(command.usage), roff(command.description));
    append_options(page, command.options, own);
  }
  for (const auto& [title, scale] : {std::pair("SCALING AND CLIPPING", true), std::pair("COMMON OPTIONS", false)}) {
    page += fmt::format(".SH {}\n", title);
    const auto belongs = [scale = scale](const OptionDescription& option) {
      return scale ? option.scale : option.common;
    };
    for (const OptionDescription& option : united(commands, belongs)) {
      const std::string names = takers(commands, option);
      const auto everywhere =
          static_cast<std::size_t>(std::count(names.begin(), names.end(), ',')) + 1 == commands.size();
      page += fmt::format(".TP\n{}\n{}.{}\n", tag(option), roff(option.help),
                          everywhere ? std::string() : fmt::format(" ({})", names));
    }
  }
  page += kTail;
  return page;
}

}  // namespace gradclip
