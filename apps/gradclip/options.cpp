#include "options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "command_help.hpp"
#include "command_list.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/report/structured.hpp"
#include "option_sources.hpp"
#include "option_table.hpp"
#include "suggestions.hpp"

namespace gradclip {
namespace {

/// --max-norm and --no-clip contradict each other: the stronger source wins.
void settle_clipping(Values& values) {
  const auto limit = values.find("max-norm");
  const auto none = values.find("no-clip");
  if (limit == values.end() || none == values.end() || !boolean(none->second)) return;
  if (limit->second.level == none->second.level) refuse_both(limit->second, none->second);
  values.erase(limit->second.level < none->second.level ? none : limit);
}

/// Levels are counted of modules alone.
void check_depth(const CommandLine& line, const Values& values) {
  const auto depth = values.find("depth");
  if (depth == values.end() || line.table.by == ViewBy::module || depth->second.level != Level::command_line) return;
  const auto by = values.find("by");
  refuse(depth->second, "--by module beside it, whose levels it counts",
         by == values.end() ? std::string()
                            : fmt::format("{} is {}", by->second.origin, gradclip::quoted(by->second.text)));
}

/// Of labels that nobody counts they say nothing.
void check_labels(const CommandLine& line, const Values& values) {
  if (line.labels.count || line.command == Command::tokens) return;
  for (const std::string_view name : {"ignore-index", "dp-axes"}) {
    const auto value = values.find(name);
    if (value == values.end() || value->second.level != Level::command_line) continue;
    refuse(value->second, "--num-label-tokens auto beside it, which counts the labels");
  }
}

void check_storage(const CommandLine& line, const Values& values) {
  const auto stored = values.find("dtype");
  if (stored == values.end() || line.command != Command::accumulate || size_of(line.synth.dtype) != 1) return;
  refuse(stored->second, "one of float64, float32, float16, bfloat16", "float8 gradients have scales of their own");
}

/// Each host has an OUT.partial of its own: no run can tell whether all of them are of the same earlier one.
void check_resume(const CommandLine& line, const Values& values) {
  if (!line.resume || line.common.locality != Locality::files) return;
  refuse_both(values.find("resume")->second, values.find("locality")->second);
}

/// A number apart and a tolerance are two rules: the stronger source wins.
void settle_comparison(Values& values) {
  for (const std::string_view name : {"rtol", "atol"}) {
    const auto ulp = values.find("ulp"), tolerance = values.find(name);
    if (ulp == values.end() || tolerance == values.end()) continue;
    if (ulp->second.level == tolerance->second.level) refuse_both(tolerance->second, ulp->second);
    values.erase(ulp->second.level < tolerance->second.level ? tolerance : ulp);
  }
}

/// How two dumps are compared is for a replay that --check compares.
void check_comparison(const CommandLine& line, const Values& values) {
  if (line.command != Command::accumulate || line.checked) return;
  for (const std::string_view name : {"rtol", "atol", "ulp", "equal-nan", "map", "only", "max-elements"}) {
    const auto value = values.find(name);
    if (value == values.end() || value->second.level != Level::command_line) continue;
    refuse(value->second, "--check DUMP beside it, which compares");
  }
}

/// What a sweep does not show is not measured either; and one dump is not several steps.
void check_sweep(CommandLine& line, const Values& values) {
  if (line.sweep.empty()) {
    if (line.more_dumps.empty() || line.command != Command::norms) return;
    refuse_command_line(
        fmt::format("{} dumps without --sweep, which alone takes more than one", line.more_dumps.size() + 1), "norms");
  }
  const Value& sweep = values.find("sweep")->second;
  for (const std::string_view name : {"by", "depth", "histogram", "max-norm", "no-clip", "sort", "top"}) {
    const auto value = values.find(name);
    if (value == values.end() || value->second.level != Level::command_line) continue;
    refuse_both(sweep, value->second);
  }
  line.clip.histograms = false;
}

/// Before anything is done: not every command has something for every ending.
void check_report_format(const CommandEntry& command, const Values& values) {
  const auto report = values.find("report");
  if (report == values.end()) return;
  const ReportFormat format = report_format(report->second.text);
  const bool facts = command.command == Command::synth || command.command == Command::doctor;
  const bool no_page = format == ReportFormat::html && facts;
  const bool no_cases = format == ReportFormat::junit && (facts || command.command == Command::inspect);
  if (!no_page && !no_cases) return;
  throw Error(ExitCode::usage,
              {.where = report->second.origin + ' ' + gradclip::quoted(report->second.text),
               .found = no_page ? fmt::format("reports of {} have no page", command.name)
                                : fmt::format("{} has nothing that passes or fails", command.name),
               .expected = facts ? "a name that ends in .json or .csv" : "a name that ends in .json, .csv or .html",
               .advice = {}});
}

const CommandEntry& find_command(std::string_view name) {
  for (const CommandEntry& command : command_table()) {
    if (command.name == name) return command;
  }
  std::vector<std::string> names;
  for (const CommandEntry& command : command_table()) names.emplace_back(command.name);
  refuse_command_line("no command " + gradclip::quoted(name), {}, nearest_name(name, names));
}

/// What is answered without any command. Empty: words[0] is to be one.
std::optional<std::string> answer_without_command(const std::vector<std::string>& words) {
  const std::string& first = words[0];
  if (first == "help" && words.size() > 1 && !words[1].starts_with('-')) {
    return command_help(find_command(words[1]), make_table());
  }
  if (first == "--help" || first == "-h" || first == "help") return general_help();
  if (first == "--version") return version_text();
  if (first == "--print-man") return manual_page();
  if (first == "--print-completion") {
    if (words.size() != 2 || (words[1] != "bash" && words[1] != "zsh" && words[1] != "fish")) {
      refuse_command_line("--print-completion is for one of bash, zsh, fish", {});
    }
    return completion_script(words[1]);
  }
  if (first.starts_with('-')) refuse_command_line("options come after the command", {});
  return std::nullopt;
}

void check_required(const CommandLine& line, const CommandEntry& command) {
  const auto require = [&](bool given, std::string_view found) {
    if (!given) refuse_command_line(std::string(found), command.name);
  };
  if (command.takes_dump) {
    require(!line.dump.empty(), command.command == Command::report ? "FILE.json is missing" : "DUMP is missing");
  }
  if (command.command == Command::diff) require(!line.diff.other.empty(), "a second dump is missing: diff A B");
  if (command.command == Command::check) require(!line.check.baseline.empty(), "--baseline FILE is missing");
  if ((command.bit & (kClip | kMerge | kSynth | kAccumulate | kReport)) != 0 && !line.checked) {
    require(!line.output.empty(), "--output OUT is missing");
  }
  if (command.command == Command::synth) require(!line.synth.model.empty(), "--model is missing");
}

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv, const Environment& environment) {
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  if (words.empty()) refuse_command_line("no command", {});
  CommandLine line;
  line.answer = answer_without_command(words);
  if (line.answer) return line;
  const CommandEntry& command = find_command(words[0]);
  words.erase(words.begin());

  const std::vector<OptionEntry> table = make_table();
  Arguments arguments = read_command_line(command, table, std::move(words));
  if (arguments.help || arguments.version) {
    line.answer = arguments.help ? command_help(command, table) : version_text();
    return line;
  }
  Values& values = arguments.values;
  add_environment(values, table, command.bit, environment);
  if (!arguments.config) {
    const char* path = environment("GRADCLIP_CONFIG");
    if (path != nullptr && *path != '\0') arguments.config = path;
  }
  if (arguments.config) add_config(values, table, command.bit, *arguments.config);
  line.config = arguments.config.value_or("");
  settle_clipping(values);
  settle_comparison(values);

  line.command = command.command;
  line.dump = arguments.dump;
  line.more_dumps.assign(arguments.more_dumps.begin(), arguments.more_dumps.end());
  line.diff.other = arguments.other;
  for (const OptionEntry& option : table) {
    const auto value = values.find(option.name);
    if (value != values.end()) option.apply(line, value->second);
  }
  check_depth(line, values);
  check_labels(line, values);
  check_storage(line, values);
  check_comparison(line, values);
  check_resume(line, values);
  check_sweep(line, values);
  check_report_format(command, values);
  check_required(line, command);
  line.clip.numerics = line.common.numerics;
  if (line.table.top != 0 && line.table.order == ParameterOrder::model) line.table.order = ParameterOrder::norm;
  return line;
}

TrainingStep training_step(const Manifest& manifest, const ScaleOptions& options, bool complete) {
  TrainingStep step = recorded_step(manifest);
  if (options.max_norm) step.max_norm = options.max_norm;
  if (options.no_clip) step.max_norm.reset();
  if (options.norm_type) step.order = *options.norm_type;
  if (options.pp) step.pp_enabled = *options.pp;
  if (options.pp_axis) step.pp_axis_name = *options.pp_axis;
  if (options.ep_axis) step.ep_axis_name = *options.ep_axis;
  if (options.num_label_tokens) step.num_label_tokens = options.num_label_tokens;
  if (options.dp_group_size) step.dp_group_size = options.dp_group_size;
  if (options.expert_tp_replication_factor) step.expert_tp_replication_factor = *options.expert_tp_replication_factor;
  if (options.foreach) step.foreach = *options.foreach;
  if (options.use_torch_clip_grad_norm) step.use_torch_clip_grad_norm = *options.use_torch_clip_grad_norm;
  check_step(step, ExitCode::bad_input);  // the command line's own numbers were checked when they were read
  if (complete && options.ep_axis && !options.ep_axis->empty()) require_ep_axis(manifest, *options.ep_axis);
  if (complete && options.pp_axis) require_pp_axis(manifest, *options.pp_axis);
  return step;
}

}  // namespace gradclip
