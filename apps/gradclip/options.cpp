#include "options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "command_list.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/text_file.hpp"
#include "gradclip/report/structured.hpp"
#include "gradclip/synth/model.hpp"
#include "options_sweep.hpp"
#include "suggestions.hpp"
#include "variables.hpp"

namespace gradclip {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// The table of options
// ---------------------------------------------------------------------------------------------------------------------

/// Where a value came from, strongest first.
enum class Level : std::uint8_t { command_line, environment, config };

struct Value {
  std::string text;
  std::string origin;
  Level level = Level::command_line;
};

[[noreturn]] void refuse(const Value& value, std::string expected, std::string advice = {}) {
  throw Error(ExitCode::usage, {.where = value.origin,
                                .found = gradclip::quoted(value.text),
                                .expected = std::move(expected),
                                .advice = std::move(advice)});
}

/// Options that contradict each other, each by where it came from.
[[noreturn]] void refuse_both(const Value& a, const Value& b) {
  throw Error(
      ExitCode::usage,
      {.where = a.origin + " and " + b.origin, .found = "both are given", .expected = "one of them", .advice = {}});
}

enum class Kind : std::uint8_t { value, flag, toggle };  // a toggle has an opposite, --no-NAME
enum class Section : std::uint8_t { command, scale, common };

constexpr unsigned kClip = 1, kNorms = 2, kInspect = 4, kDoctor = 8, kVerify = 16, kDiff = 32, kCheck = 64,
                   kMerge = 128, kSynth = 256, kReport = 512, kTokens = 1024, kAccumulate = 2048;
constexpr unsigned kAll = ~kReport;  // that work: report only draws what another found

struct OptionEntry {
  std::string name;
  Kind kind;
  Section section;
  unsigned commands;  ///< that take it
  std::string metavar;
  std::string help;
  std::function<void(CommandLine&, const Value&)> apply;
};

double number(const Value& value, const std::string& expected) {
  const std::optional<double> parsed = parse_number(value.text);
  if (!parsed) refuse(value, expected);
  return *parsed;
}

constexpr std::int64_t kMostInteger = std::int64_t{1} << 62;

std::int64_t integer(const Value& value, std::int64_t low, std::int64_t high = kMostInteger) {
  const std::optional<std::int64_t> parsed = parse_integer(value.text, low, high);
  if (parsed) return *parsed;
  const bool digits = !value.text.empty() && value.text.find_first_not_of("0123456789") == std::string::npos;
  if (high == kMostInteger && !(digits && value.text.size() > 1)) {
    refuse(value, fmt::format("a whole number of at least {}", low));
  }
  refuse(value, fmt::format("a whole number from {} to {}", low, high));
}

bool boolean(const Value& value) {
  const std::optional<bool> parsed = parse_boolean(value.text);
  if (!parsed) refuse(value, "true or false");
  return *parsed;
}

template <class Choice>
Choice choice(const Value& value, std::initializer_list<std::pair<std::string_view, Choice>> choices) {
  std::string names;
  for (const auto& [name, meaning] : choices) {
    if (value.text == name) return meaning;
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  refuse(value, "one of " + names);
}

double max_norm(const Value& value) {
  const double limit = number(value, "a number of at least 0, or inf");
  if (!(limit >= 0.0)) refuse(value, "a number of at least 0, or inf");
  return limit;
}

double tolerance(const Value& value) {
  const double limit = number(value, "a number of at least 0");
  if (!(limit >= 0.0)) refuse(value, "a number of at least 0");
  return limit;
}

NormOrder norm_type(const Value& value) {
  const double p = number(value, "a number above 0, or inf");
  if (!(p > 0.0)) refuse(value, "a number above 0, or inf");
  if (p > kLargestOrder && !std::isinf(p)) refuse(value, "a number up to 1000, or inf");
  return NormOrder{p};
}

DType dtype(const Value& value) {
  const std::optional<DType> dtype = parse_dtype(value.text);
  if (!dtype) refuse(value, fmt::format("one of {}", dtype_names()));
  return *dtype;
}

void num_label_tokens(CommandLine& line, const Value& value) {
  line.labels.count = value.text == "auto";
  if (line.labels.count) return;
  const std::optional<std::int64_t> number = parse_integer(value.text, 0, std::int64_t{1} << 62);
  if (!number) refuse(value, "a whole number of at least 0, or auto");
  line.scale.num_label_tokens = number;
}

/// Every option but DUMP, --help and --version.
std::vector<OptionEntry> make_table() {
  using Line = CommandLine;
  return {
      {"output", Kind::value, Section::command, kClip | kMerge | kSynth | kAccumulate | kReport, "OUT",
       "where the output goes (required)", [](Line& line, const Value& v) { line.output = v.text; }},
      {"overwrite", Kind::flag, Section::command, kClip | kMerge | kSynth | kAccumulate, "", "replace OUT if it exists",
       [](Line& line, const Value& v) { line.overwrite = boolean(v); }},
      {"total-norm", Kind::value, Section::command, kClip, "X",
       "use this total, decimal or hexadecimal (0x1.8p+1), and skip the first pass",
       [](Line& line, const Value& v) {
         const double total = number(v, "a number of at least 0, inf or nan");
         if (total < 0.0) refuse(v, "a number of at least 0, inf or nan");
         line.clip.total_norm = total;
       }},
      {"verify", Kind::flag, Section::command, kClip | kNorms | kCheck, "",
       "check every rank file's recorded checksum before anything else",
       [](Line& line, const Value& v) { line.verify = boolean(v); }},
      {"by", Kind::value, Section::command, kNorms, "WHAT",
       "rows of the table: parameter (default), module, group, stage, dtype or rank",
       [](Line& line, const Value& v) {
         line.table.by = choice<ViewBy>(v, {{"parameter", ViewBy::parameter},
                                            {"module", ViewBy::module},
                                            {"group", ViewBy::group},
                                            {"stage", ViewBy::stage},
                                            {"dtype", ViewBy::dtype},
                                            {"rank", ViewBy::rank}});
       }},
      {"depth", Kind::value, Section::command, kNorms, "N", "with --by module: levels from the root (default: all)",
       [](Line& line, const Value& v) { line.table.depth = static_cast<std::size_t>(integer(v, 1)); }},
      {"sort", Kind::value, Section::command, kNorms, "KEY",
       "order of the table: norm, max, nan or name (default: model order; norm with --top)",
       [](Line& line, const Value& v) {
         line.table.order = choice<ParameterOrder>(v, {{"norm", ParameterOrder::norm},
                                                       {"max", ParameterOrder::max},
                                                       {"nan", ParameterOrder::nan},
                                                       {"name", ParameterOrder::name}});
       }},
      {"top", Kind::value, Section::command, kNorms, "N", "only the first N rows of the table",
       [](Line& line, const Value& v) { line.table.top = static_cast<std::size_t>(integer(v, 1)); }},
      {"histogram", Kind::flag, Section::command, kNorms, "",
       "binary exponents, and what casts to float16, bfloat16 and float8 would lose",
       [](Line& line, const Value& v) { line.clip.histograms = boolean(v); }},
      {"sweep", Kind::value, Section::command, kNorms, "LIST",
       "how often and how hard each max norm would have clipped the steps: 0.1:10, 0.1:10:COUNT or 0.5,1,2",
       [](Line& line, const Value& v) {
         const std::optional<std::vector<double>> max_norms = parse_sweep(v.text);
         if (!max_norms)
           refuse(v, "a range LOW:HIGH or LOW:HIGH:COUNT of numbers above 0, or a list of numbers, at most 1000");
         line.sweep = *max_norms;
       }},
      {"baseline", Kind::value, Section::command, kCheck, "FILE", "the committed baseline (required)",
       [](Line& line, const Value& v) { line.check.baseline = v.text; }},
      {"update", Kind::flag, Section::command, kCheck, "", "write the baseline from this dump and say what changed",
       [](Line& line, const Value& v) { line.check.options.update = boolean(v); }},
      {"allow-nonfinite", Kind::flag, Section::command, kCheck, "",
       "compare, and with --update write, NaN and infinities like other counts",
       [](Line& line, const Value& v) { line.check.options.allow_nonfinite = boolean(v); }},
      {"rtol", Kind::value, Section::command, kDiff | kCheck, "R",
       "equal when |a - b| <= A + R x |b| (default: the narrower type's epsilon; check: the baseline's)",
       [](Line& line, const Value& v) { line.diff.rule.relative = line.check.options.relative = tolerance(v); }},
      {"atol", Kind::value, Section::command, kDiff | kCheck, "A", "the absolute part of it",
       [](Line& line, const Value& v) {
         line.check.options.absolute = tolerance(v);
         line.diff.rule.absolute = *line.check.options.absolute;
       }},
      {"ulp", Kind::value, Section::command, kDiff, "N",
       "in place of both: equal when at most N numbers of the type apart",
       [](Line& line, const Value& v) { line.diff.rule.ulps = static_cast<std::uint64_t>(integer(v, 0)); }},
      {"equal-nan", Kind::flag, Section::command, kDiff, "", "a NaN equals a NaN",
       [](Line& line, const Value& v) { line.diff.rule.equal_nan = boolean(v); }},
      {"map", Kind::value, Section::command, kDiff, "FILE", "names of A as B has them: lines of 'old-regex -> new'",
       [](Line& line, const Value& v) { line.diff.map = v.text; }},
      {"only", Kind::value, Section::command, kDiff | kMerge, "REGEX", "only parameters of which it matches a name",
       [](Line& line, const Value& v) {
         line.diff.only = v.text;
         line.merge.only = v.text;
       }},
      {"safetensors", Kind::flag, Section::command, kMerge, "", "OUT is a safetensors file instead of a dump",
       [](Line& line, const Value& v) {
         line.merge.format = boolean(v) ? MergeFormat::safetensors : MergeFormat::dump;
       }},
      {"max-elements", Kind::value, Section::command, kDiff, "N",
       "also the N worst elements of each parameter, with both values",
       [](Line& line, const Value& v) {
         line.diff.max_elements = static_cast<std::size_t>(integer(v, 0, kMostWorstElements));
       }},
      {"model", Kind::value, Section::command, kSynth, "MODEL",
       "llama-8b, llama-70b, moe-tiny or a description file (required)",
       [](Line& line, const Value& v) { line.synth.model = v.text; }},
      {"mesh", Kind::value, Section::command, kSynth, "SIZES", "of the job: pp=2,dp_shard=2,tp=2 (default dp_shard=1)",
       [](Line& line, const Value& v) { line.synth.mesh = parse_mesh_sizes(v.text); }},
      {"dtype", Kind::value, Section::command, kSynth | kAccumulate, "TYPE",
       "of the gradients in OUT (default: synth bfloat16, accumulate the reduce type)",
       [](Line& line, const Value& v) {
         line.synth.dtype = dtype(v);
         line.accumulate.storage_dtype = line.synth.dtype;
       }},
      {"reduce-dtype", Kind::value, Section::command, kAccumulate, "TYPE",
       "in which microbatches are added and ranks reduced (default float32; float64 for float64)",
       [](Line& line, const Value& v) {
         line.accumulate.reduce_dtype = choice<DType>(
             v, {{"float32", DType::float32}, {"bfloat16", DType::bfloat16}, {"float64", DType::float64}});
       }},
      {"seed", Kind::value, Section::command, kSynth, "N", "of the values (default 0)",
       [](Line& line, const Value& v) { line.synth.seed = static_cast<std::uint64_t>(integer(v, 0)); }},
      {"layers", Kind::value, Section::command, kSynth, "N", "cut the model down to its first N layers",
       [](Line& line, const Value& v) { line.synth.layers = integer(v, 1); }},
      {"scale", Kind::value, Section::command, kSynth, "S", "largest standard deviation of a parameter (default 0.01)",
       [](Line& line, const Value& v) {
         line.synth.scale = number(v, "a number above 0");
         if (!(line.synth.scale > 0.0) || std::isinf(line.synth.scale)) refuse(v, "a number above 0");
       }},
      {"inject", Kind::value, Section::command, kSynth, "WHAT",
       "one wrong element: nan, inf or replica, then :PARAMETER and :RANK if wanted",
       [](Line& line, const Value& v) { line.synth.injection = parse_injection(v.text); }},

      {"max-norm", Kind::value, Section::scale, kClip | kNorms | kCheck, "X",
       "clip to this total norm; inf never clips",
       [](Line& line, const Value& v) { line.scale.max_norm = max_norm(v); }},
      {"no-clip", Kind::flag, Section::scale, kClip | kNorms | kCheck, "", "clip nothing, whatever was recorded",
       [](Line& line, const Value& v) { line.scale.no_clip = boolean(v); }},
      {"nonfinite", Kind::value, Section::scale, kClip | kNorms | kCheck, "POLICY",
       "a total that is NaN or inf: propagate (default), error, skip or zero",
       [](Line& line, const Value& v) {
         line.clip.nonfinite = choice<NonfinitePolicy>(v, {{"propagate", NonfinitePolicy::propagate},
                                                           {"error", NonfinitePolicy::error},
                                                           {"skip", NonfinitePolicy::skip},
                                                           {"zero", NonfinitePolicy::zero}});
       }},
      {"no-scale", Kind::flag, Section::scale, kClip | kNorms | kCheck, "",
       "leave out the division by tokens and experts",
       [](Line& line, const Value& v) { line.clip.no_scale = boolean(v); }},
      {"num-label-tokens", Kind::value, Section::scale, kClip | kNorms | kCheck, "N",
       "label tokens of the step, in all; auto: counted from its labels", num_label_tokens},
      {"ignore-index", Kind::value, Section::scale, kClip | kNorms | kCheck | kTokens, "N",
       "the label that does not count (default -100)",
       [](Line& line, const Value& v) { line.labels.ignore_index = integer(v, -(std::int64_t{1} << 62)); }},
      {"dp-axes", Kind::value, Section::scale, kClip | kNorms | kCheck | kTokens, "NAMES",
       "axes of the device mesh with labels of their own, for auto (default: dp,dp_replicate,dp_shard)",
       [](Line& line, const Value& v) {
         line.labels.dp_axes = parse_axes(v.text);
         if (line.labels.dp_axes.empty()) refuse(v, "names of axes, separated by commas");
       }},
      {"dp-group-size", Kind::value, Section::scale, kClip | kNorms | kCheck, "N", "size of the data-parallel group",
       [](Line& line, const Value& v) { line.scale.dp_group_size = integer(v, 1); }},
      {"expert-tp-replication-factor", Kind::value, Section::scale, kClip | kNorms | kCheck, "N",
       "factor of the expert divisor",
       [](Line& line, const Value& v) { line.scale.expert_tp_replication_factor = integer(v, 1); }},
      {"pp", Kind::toggle, Section::scale, kClip | kNorms | kCheck | kVerify, "",
       "whether the step ran with pipeline parallelism",
       [](Line& line, const Value& v) { line.scale.pp = boolean(v); }},
      {"pp-axis", Kind::value, Section::scale, kClip | kNorms | kCheck | kVerify | kTokens, "NAME",
       "pipeline dimension of the device mesh", [](Line& line, const Value& v) { line.scale.pp_axis = v.text; }},
      {"ep-axis", Kind::value, Section::scale, kClip | kNorms | kCheck | kVerify, "NAME",
       "expert dimension of the MoE mesh", [](Line& line, const Value& v) { line.scale.ep_axis = v.text; }},
      {"foreach", Kind::toggle, Section::scale, kClip | kNorms | kCheck, "", "as the step passed it",
       [](Line& line, const Value& v) { line.scale.foreach = boolean(v); }},
      {"use-torch-clip-grad-norm", Kind::toggle, Section::scale, kClip | kNorms | kCheck, "", "as the step passed it",
       [](Line& line, const Value& v) { line.scale.use_torch_clip_grad_norm = boolean(v); }},

      {"norm-type", Kind::value, Section::common, kAll, "P", "p of the p-norm: a number above 0, or inf",
       [](Line& line, const Value& v) { line.scale.norm_type = norm_type(v); }},
      {"numerics", Kind::value, Section::common, kAll, "HOW",
       "exact (default), or a framework's arithmetic: automodel, automodel-cpu, torch",
       [](Line& line, const Value& v) {
         line.common.numerics = choice<Numerics>(v, {{"exact", Numerics::exact},
                                                     {"automodel", Numerics::automodel},
                                                     {"automodel-cpu", Numerics::automodel_cpu},
                                                     {"torch", Numerics::torch}});
       }},
      {"report", Kind::value, Section::common, kAll, "FILE",
       "also write a report; its ending says how: .json .csv .html .xml",
       [](Line& line, const Value& v) {
         static_cast<void>(report_format(v.text));
         line.common.report = v.text;
       }},
      {"format", Kind::value, Section::common, kAll, "HOW", "of stdout: text (default) or json",
       [](Line& line, const Value& v) {
         line.common.format = choice<OutputFormat>(v, {{"text", OutputFormat::text}, {"json", OutputFormat::json}});
       }},
      {"strict", Kind::flag, Section::common, kAll, "", "findings exit 1",
       [](Line& line, const Value& v) { line.common.strict = boolean(v); }},
      {"device", Kind::value, Section::common, kAll, "WHAT", "auto (default), cuda or cpu",
       [](Line& line, const Value& v) {
         line.common.device = choice<DeviceChoice>(
             v, {{"auto", DeviceChoice::automatic}, {"cuda", DeviceChoice::cuda}, {"cpu", DeviceChoice::cpu}});
       }},
      {"threads", Kind::value, Section::common, kAll, "N", "of each process (default: its share of the processors)",
       [](Line& line, const Value& v) { line.common.threads = static_cast<std::size_t>(integer(v, 1, 65536)); }},
      {"memory-budget", Kind::value, Section::common, kAll, "SIZE",
       "of each process: 4G, 512Mi (default: half the memory divided by the processes)",
       [](Line& line, const Value& v) {
         line.common.memory_budget = parse_size(v.text);
         if (!line.common.memory_budget) refuse(v, "a size such as 4G or 512Mi");
       }},
      {"device-memory-budget", Kind::value, Section::common, kClip | kNorms | kCheck, "SIZE",
       "of each process on its device (default: half of what is free, divided by the processes on it)",
       [](Line& line, const Value& v) {
         line.common.device_memory_budget = parse_size(v.text);
         if (!line.common.device_memory_budget) refuse(v, "a size such as 4G or 512Mi");
       }},
      {"offload", Kind::flag, Section::common, kClip | kNorms | kCheck, "",
       "one model part at a time on the device, the others in host memory",
       [](Line& line, const Value& v) { line.common.offload = boolean(v); }},
      {"progress", Kind::toggle, Section::common, kAll, "", "progress on stderr (default: if that is a terminal)",
       [](Line& line, const Value& v) { line.common.progress = boolean(v); }},
      {"quiet", Kind::flag, Section::common, kAll | kReport, "", "no text on stdout, no progress",
       [](Line& line, const Value& v) { line.common.quiet = boolean(v); }},
      {"color", Kind::value, Section::common, kAll | kReport, "WHEN", "auto (default), always or never",
       [](Line& line, const Value& v) {
         line.common.colour = choice<ColourChoice>(
             v, {{"auto", ColourChoice::automatic}, {"always", ColourChoice::always}, {"never", ColourChoice::never}});
       }},
  };
}

// ---------------------------------------------------------------------------------------------------------------------
// Commands and their help
// ---------------------------------------------------------------------------------------------------------------------

struct CommandEntry {
  std::string_view name;
  Command command;
  unsigned bit;
  bool takes_dump;
  std::string_view usage;
  std::string_view summary;
  std::string_view description;
};

constexpr std::array<CommandEntry, 12> kCommands{{
    {"clip", Command::clip, kClip, true, "clip DUMP -o OUT [options]", "scale, measure the total norm, clip",
     "Scales a recorded step's gradients, measures their total norm and clips them into OUT, a dump\n"
     "of the same layout. Shows the right total beside the one that each recorded rank used."},
    {"norms", Command::norms, kNorms, true, "norms DUMP [options]", "the same statistics, writes no gradients",
     "Measures the scaled gradients of a recorded step: a table by parameter, the total, what each\n"
     "recorded rank saw. With --sweep it takes the dumps of several steps. Writes no gradients."},
    {"inspect", Command::inspect, kInspect, true, "inspect DUMP [options]", "what is in a dump; reads no gradient data",
     "Shows what is in a dump: meshes, placements, sizes, training numbers. Reads the manifest only."},
    {"verify", Command::verify, kVerify, true, "verify DUMP [options]", "everything that is wrong with a dump",
     "Checks a dump: files, shapes, placements, types, checksums, copies that should be equal, gradients\n"
     "of nothing but zeros, ranks that would disagree on the total. Lists all that is wrong, worst\n"
     "first, and exits 1 if there is anything."},
    {"diff", Command::diff, kDiff, true, "diff A B [options]", "compares two dumps, whatever their layouts",
     "Compares the gradients of two dumps in global coordinates: two layouts, two frameworks, two steps.\n"
     "Names the first parameter that differs, and a constant ratio as what it is. Exits 1 if anything differs."},
    {"check", Command::check, kCheck, true, "check DUMP --baseline FILE [--update] [options]",
     "norms and findings against a committed baseline",
     "Measures a dump as norms does and compares it with a baseline file: counts exactly, norms within tolerances.\n"
     "Exits 1 if anything regressed, if there is no baseline yet, and for NaN and infinities in any case."},
    {"merge", Command::merge, kMerge, true, "merge DUMP -o OUT [options]", "full tensors, one for each parameter",
     "Puts the shards of every parameter together and writes the full tensors: into OUT, a dump of one\n"
     "rank, or a safetensors file. Raw values: nothing is scaled."},
    {"tokens", Command::tokens, kTokens, true, "tokens DUMP [options]", "label tokens and padding of a step",
     "Counts the label tokens of a recorded step, once for each data-parallel coordinate, and the padding\n"
     "at the end of its sequences. Compares the copies of labels on tp, cp and pp ranks. Reads no gradients."},
    {"accumulate", Command::accumulate, kAccumulate, true, "accumulate DUMP... -o OUT [options]",
     "the gradient of a step from its microbatches",
     "Replays gradient accumulation: the dumps of all microbatches of a step become OUT, what the step\n"
     "clips, by one reduction at the last one, as FSDP2 with deferred synchronisation makes it."},
    {"synth", Command::synth, kSynth, false, "synth -o OUT --model MODEL [options]",
     "a synthetic dump of a model's shapes",
     "Makes a dump of a model's shapes on any mesh, of any type. Its values depend on the seed, the\n"
     "parameter and the global index alone: two layouts of one seed hold the same gradient."},
    {"report", Command::report, kReport, true, "report FILE.json -o FILE.html [options]",
     "one HTML page of a JSON report",
     "Makes one self-contained HTML page of a report that --report FILE.json wrote: findings, norms and\n"
     "differences by layer, shares, what each rank holds, a table. The page loads nothing."},
    {"doctor", Command::doctor, kDoctor, false, "doctor [options]", "what this build and this machine offer",
     "Shows what this build and this machine offer: versions, processor, memory, communicators."},
}};

/// What every command answers by itself.
const std::vector<OptionDescription>& universal_options() {
  static const std::vector<OptionDescription> options{
      {.name = "config", .metavar = "FILE.json", .help = "options from a file, long names as keys", .common = true},
      {.name = "version", .help = "print the version", .common = true},
      {.name = "help", .letter = "h", .help = "print this", .common = true}};
  return options;
}

constexpr std::string_view kOutro =
    "Options also come from the environment (GRADCLIP_MAX_NORM=1 for --max-norm 1) and from --config;\n"
    "the command line beats the environment, which beats the file, which beats the dump's manifest.\n\n"
    "Exit codes: 0 done, 1 findings (--strict), 2 usage, 3 bad input, 4 non-finite total refused,\n"
    "            5 resources, 70 a bug in gradclip\n";

/// Variables that are no options: this program's others (docs/command-line.md), and those of its tests.
constexpr std::string_view kOtherVariables[] = {"GRADCLIP_CONFIG", "GRADCLIP_CPU_KERNELS", "GRADCLIP_NCCL_TIMEOUT",
                                                "GRADCLIP_BIN",    "GRADCLIP_BUILD",       "GRADCLIP_KEEP",
                                                "GRADCLIP_LONG",   "GRADCLIP_SEED"};
constexpr std::string_view kOtherFamilies[] = {"GRADCLIP_EMULATION_", "GRADCLIP_CONFORMANCE_", "GRADCLIP_TEST_"};

std::string version_text() {
  return "gradclip " GRADCLIP_VERSION "\n";
}

std::string general_help() {
  std::string text =
      "Clips, checks and explains recorded sharded gradients.\n\n"
      "Usage: gradclip COMMAND DUMP [options]                one process\n"
      "       mpirun -np N gradclip COMMAND DUMP [options]   several: the same output, the same bits\n\n"
      "Commands\n";
  for (const CommandEntry& command : kCommands) text += fmt::format("  {:<10}  {}\n", command.name, command.summary);
  text +=
      "\n  gradclip help COMMAND      the command's options; so does gradclip COMMAND --help\n  gradclip --version\n\n";
  return text + std::string(kOutro);
}

std::string spelling(const OptionEntry& option) {
  std::string text = option.name == "output" ? "-o, --output" : "--" + option.name;
  if (option.kind == Kind::toggle) text += ", --no-" + option.name;
  if (!option.metavar.empty()) text += ' ' + option.metavar;
  return text;
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
  return text + '\n' + std::string(kOutro);
}

// ---------------------------------------------------------------------------------------------------------------------
// The same for shells and the manual
// ---------------------------------------------------------------------------------------------------------------------

/// The values that an option takes by name. They stand in one place, and its refusal of any other value lists them.
std::vector<std::string> choices_of(const OptionEntry& option) {
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
  return choices;
}

// ---------------------------------------------------------------------------------------------------------------------
// The three sources
// ---------------------------------------------------------------------------------------------------------------------

using Values = std::map<std::string, Value, std::less<>>;  // by option name, without "no-"

/// @param meant  what it probably was meant to be; empty: nobody knows
[[noreturn]] void refuse_command_line(const std::string& found, std::string_view command,
                                      const std::string& meant = {}) {
  const std::string help = command.empty() ? "see gradclip --help" : fmt::format("see gradclip {} --help", command);
  throw Error(ExitCode::usage, {.where = "command line",
                                .found = found,
                                .expected = {},
                                .advice = meant.empty() ? help : fmt::format("did you mean {}? Else {}", meant, help)});
}

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

struct Arguments {
  Values values;
  std::string dump;
  std::vector<std::string> more_dumps;  ///< norms
  std::string other;                    ///< diff
  std::optional<std::string> config;
  bool help = false;
  bool version = false;
};

/// CLI11 splits the words; values stay text.
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

void add_environment(Values& values, const std::vector<OptionEntry>& table, unsigned commands,
                     const Environment& environment) {
  add_values(values, table, commands, [&](const std::string& option) -> std::optional<Value> {
    const std::string name = environment_name(option);
    const char* text = environment(name.c_str());
    if (text == nullptr || *text == '\0') return std::nullopt;
    return Value{text, name, Level::environment};
  });
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

/// --max-norm and --no-clip contradict each other: the stronger source wins.
void settle_clipping(Values& values) {
  const auto limit = values.find("max-norm");
  const auto none = values.find("no-clip");
  if (limit == values.end() || none == values.end() || !boolean(none->second)) return;
  if (limit->second.level == none->second.level) refuse_both(limit->second, none->second);
  values.erase(limit->second.level < none->second.level ? none : limit);
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
  for (const CommandEntry& command : kCommands) {
    if (command.name == name) return command;
  }
  std::vector<std::string> names;
  for (const CommandEntry& command : kCommands) names.emplace_back(command.name);
  refuse_command_line("no command " + gradclip::quoted(name), {}, nearest_name(name, names));
}

/// Text and magnitude of a number without its sign.
std::optional<double> unsigned_number(std::string_view text) noexcept {
  std::chars_format format = std::chars_format::general;
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) {
    format = std::chars_format::hex;
    text.remove_prefix(2);
  }
  if (text.empty() || text.front() == '-' || text.front() == '+') return std::nullopt;
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, format);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  // from_chars takes "inf" and "nan" after "0x" too.
  if (format == std::chars_format::hex && !std::isfinite(value)) return std::nullopt;
  return value;
}

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv, const Environment& environment) {
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  CommandLine line;
  if (words.empty()) refuse_command_line("no command", {});
  if (words[0] == "help" && words.size() > 1 && !words[1].starts_with('-')) {
    line.answer = command_help(find_command(words[1]), make_table());
    return line;
  }
  if (words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    line.answer = general_help();
    return line;
  }
  if (words[0] == "--version") {
    line.answer = version_text();
    return line;
  }
  if (words[0] == "--print-man") {
    line.answer = manual_page();
    return line;
  }
  if (words[0] == "--print-completion") {
    if (words.size() != 2 || (words[1] != "bash" && words[1] != "zsh" && words[1] != "fish")) {
      refuse_command_line("--print-completion is for one of bash, zsh, fish", {});
    }
    line.answer = completion_script(words[1]);
    return line;
  }
  if (words[0].starts_with('-')) refuse_command_line("options come after the command", {});
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
  settle_clipping(values);

  line.command = command.command;
  line.dump = arguments.dump;
  line.more_dumps.assign(arguments.more_dumps.begin(), arguments.more_dumps.end());
  line.diff.other = arguments.other;
  for (const OptionEntry& option : table) {
    const auto value = values.find(option.name);
    if (value != values.end()) option.apply(line, value->second);
  }
  if (const auto depth = values.find("depth");
      depth != values.end() && line.table.by != ViewBy::module && depth->second.level == Level::command_line) {
    const auto by = values.find("by");
    refuse(depth->second, "--by module beside it, whose levels it counts",
           by == values.end() ? std::string()
                              : fmt::format("{} is {}", by->second.origin, gradclip::quoted(by->second.text)));
  }
  if (const auto stored = values.find("dtype");
      stored != values.end() && command.command == Command::accumulate && size_of(line.synth.dtype) == 1) {
    refuse(stored->second, "one of float64, float32, float16, bfloat16", "float8 gradients have scales of their own");
  }
  check_sweep(line, values);
  check_report_format(command, values);
  line.clip.numerics = line.common.numerics;
  if (line.table.top != 0 && line.table.order == ParameterOrder::model) line.table.order = ParameterOrder::norm;
  if (command.takes_dump && line.dump.empty()) {
    refuse_command_line(command.command == Command::report ? "FILE.json is missing" : "DUMP is missing", command.name);
  }
  if (command.command == Command::diff && line.diff.other.empty())
    refuse_command_line("a second dump is missing: diff A B", command.name);
  if (command.command == Command::check && line.check.baseline.empty())
    refuse_command_line("--baseline FILE is missing", command.name);
  if ((command.bit & (kClip | kMerge | kSynth | kAccumulate | kReport)) != 0 && line.output.empty())
    refuse_command_line("--output OUT is missing", command.name);
  if (command.command == Command::synth && line.synth.model.empty())
    refuse_command_line("--model is missing", command.name);
  return line;
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

TrainingStep training_step(const Manifest& manifest, const ScaleOptions& options) {
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
  return step;
}

std::string_view name(Command command) noexcept {
  for (const CommandEntry& entry : kCommands) {
    if (entry.command == command) return entry.name;
  }
  return {};
}

std::vector<CommandDescription> describe_commands() {
  const std::vector<OptionEntry> table = make_table();
  std::vector<CommandDescription> commands;
  for (const CommandEntry& command : kCommands) {
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
                                   option.section == Section::common, choices_of(option)});
    }
    described.options.insert(described.options.end(), universal_options().begin(), universal_options().end());
  }
  return commands;
}

std::string cli11_version() {
  return CLI11_VERSION;
}

std::optional<double> parse_number(std::string_view text) noexcept {
  bool negative = false;
  if (!text.empty() && (text.front() == '-' || text.front() == '+')) {
    negative = text.front() == '-';
    text.remove_prefix(1);
  }
  const std::optional<double> magnitude = unsigned_number(text);
  if (!magnitude) return std::nullopt;
  return negative ? -*magnitude : *magnitude;
}

std::optional<std::int64_t> parse_integer(std::string_view text, std::int64_t low, std::int64_t high) noexcept {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> parse_size(std::string_view text) noexcept {
  if (text.size() > 1 && (text.back() == 'B' || text.back() == 'b')) text.remove_suffix(1);
  double base = 1000.0;
  if (text.size() > 1 && (text.back() == 'i' || text.back() == 'I')) {
    base = 1024.0;
    text.remove_suffix(1);
  }
  double unit = 1.0;
  if (!text.empty()) {
    constexpr std::string_view kUnits = "kmgt";
    const char last = static_cast<char>(text.back() | 0x20);
    const std::size_t power = kUnits.find(last);
    if (power != std::string_view::npos) {
      for (std::size_t i = 0; i <= power; ++i) unit *= base;
      text.remove_suffix(1);
    } else if (base == 1024.0) {
      return std::nullopt;
    }
  }
  if (text.empty() || text.find_first_not_of("0123456789.") != std::string_view::npos) return std::nullopt;
  const std::optional<double> value = unsigned_number(text);
  if (!value) return std::nullopt;
  const double bytes = std::floor(*value * unit);
  if (!(bytes >= 1.0) || bytes > 0x1p62) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

std::optional<bool> parse_boolean(std::string_view text) noexcept {
  for (const std::string_view yes : {"1", "true", "yes", "on"}) {
    if (text == yes) return true;
  }
  for (const std::string_view no : {"0", "false", "no", "off"}) {
    if (text == no) return false;
  }
  return std::nullopt;
}

}  // namespace gradclip
