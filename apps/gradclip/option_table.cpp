#include "option_table.hpp"

#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/report/structured.hpp"
#include "option_values.hpp"
#include "options_sweep.hpp"

namespace gradclip {
namespace {

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

}  // namespace

void refuse(const Value& value, std::string expected, std::string advice) {
  throw Error(ExitCode::usage, {.where = value.origin,
                                .found = gradclip::quoted(value.text),
                                .expected = std::move(expected),
                                .advice = std::move(advice)});
}

void refuse_both(const Value& a, const Value& b) {
  throw Error(
      ExitCode::usage,
      {.where = a.origin + " and " + b.origin, .found = "both are given", .expected = "one of them", .advice = {}});
}

bool boolean(const Value& value) {
  const std::optional<bool> parsed = parse_boolean(value.text);
  if (!parsed) refuse(value, "true or false");
  return *parsed;
}

std::vector<OptionEntry> make_table() {
  using Line = CommandLine;
  return {
      {"output", Kind::value, Section::command, kClip | kMerge | kSynth | kAccumulate | kReport, "OUT",
       "where the output goes (required; accumulate: unless --check)",
       [](Line& line, const Value& v) { line.output = v.text; }},
      {"overwrite", Kind::flag, Section::command, kClip | kMerge | kSynth | kAccumulate, "", "replace OUT if it exists",
       [](Line& line, const Value& v) { line.overwrite = boolean(v); }},
      {"resume", Kind::flag, Section::command, kClip, "",
       "take over what an interrupted run has finished; keep what this one finishes if it is interrupted",
       [](Line& line, const Value& v) { line.resume = boolean(v); }},
      {"paranoid", Kind::flag, Section::command, kClip | kSynth | kAccumulate, "",
       "read the output back and compare it with what was computed, before it gets its name",
       [](Line& line, const Value& v) { line.paranoid = boolean(v); }},
      {"total-norm", Kind::value, Section::command, kClip, "X",
       "use this total, decimal or hexadecimal (0x1.8p+1), and skip the first pass",
       [](Line& line, const Value& v) {
         const double total = number(v, "a number of at least 0, inf or nan");
         if (total < 0.0) refuse(v, "a number of at least 0, inf or nan");
         line.clip.total_norm = total;
       }},
      {"verify", Kind::flag, Section::command, kMeasure, "",
       "check every rank file's recorded checksum before anything else",
       [](Line& line, const Value& v) { line.verify = boolean(v); }},
      {"isolate", Kind::toggle, Section::command, kVerify, "",
       "check rank files in processes of their own, which a damaged file may crash (default)",
       [](Line& line, const Value& v) { line.isolate = boolean(v); }},
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
      {"rtol", Kind::value, Section::command, kDiff | kCheck | kAccumulate, "R",
       "equal when |a - b| <= A + R x |b| (default: the narrower type's epsilon; check: the baseline's)",
       [](Line& line, const Value& v) { line.diff.rule.relative = line.check.options.relative = tolerance(v); }},
      {"atol", Kind::value, Section::command, kDiff | kCheck | kAccumulate, "A", "the absolute part of it",
       [](Line& line, const Value& v) {
         line.check.options.absolute = tolerance(v);
         line.diff.rule.absolute = *line.check.options.absolute;
       }},
      {"ulp", Kind::value, Section::command, kDiff | kAccumulate, "N",
       "in place of --rtol and --atol: equal when at most N numbers of the type apart",
       [](Line& line, const Value& v) { line.diff.rule.ulps = static_cast<std::uint64_t>(integer(v, 0)); }},
      {"equal-nan", Kind::flag, Section::command, kDiff | kAccumulate, "", "a NaN equals a NaN",
       [](Line& line, const Value& v) { line.diff.rule.equal_nan = boolean(v); }},
      {"map", Kind::value, Section::command, kDiff | kAccumulate, "FILE",
       "names of A as B has them: lines of 'old-regex -> new'",
       [](Line& line, const Value& v) { line.diff.map = v.text; }},
      {"only", Kind::value, Section::command, kDiff | kMerge | kAccumulate, "REGEX",
       "only parameters of which it matches a name",
       [](Line& line, const Value& v) {
         line.diff.only = v.text;
         line.merge.only = v.text;
       }},
      {"safetensors", Kind::flag, Section::command, kMerge, "", "OUT is a safetensors file instead of a dump",
       [](Line& line, const Value& v) {
         line.merge.format = boolean(v) ? MergeFormat::safetensors : MergeFormat::dump;
       }},
      {"max-elements", Kind::value, Section::command, kDiff | kAccumulate, "N",
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
       "of the gradients in OUT (default: synth bfloat16; accumulate as recorded, else the reduce type)",
       [](Line& line, const Value& v) {
         line.synth.dtype = dtype(v);
         line.accumulate.types.storage = line.synth.dtype;
       }},
      {"reduce-dtype", Kind::value, Section::command, kAccumulate, "TYPE",
       "in which microbatches are added and ranks reduced (default: as recorded, else float32; float64 for float64)",
       [](Line& line, const Value& v) {
         line.accumulate.types.reduce = choice<DType>(v, {{"float32", DType::float32},
                                                          {"bfloat16", DType::bfloat16},
                                                          {"float16", DType::float16},
                                                          {"float64", DType::float64}});
       }},
      {"check", Kind::value, Section::command, kAccumulate, "DUMP",
       "compare the result with what training had, as diff does; -o may then be missing",
       [](Line& line, const Value& v) { line.checked = v.text; }},
      {"sync", Kind::value, Section::command, kAccumulate, "WHEN",
       "where a reduction ends a window of microbatches: deferred, every, schedule (default: as recorded, else "
       "deferred)",
       [](Line& line, const Value& v) {
         line.accumulate.sync = choice<Synchronisation>(v, {{"deferred", Synchronisation::deferred},
                                                            {"every", Synchronisation::every},
                                                            {"schedule", Synchronisation::schedule}});
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

      {"max-norm", Kind::value, Section::scale, kMeasure, "X", "clip to this total norm; inf never clips",
       [](Line& line, const Value& v) { line.scale.max_norm = max_norm(v); }},
      {"no-clip", Kind::flag, Section::scale, kMeasure, "", "clip nothing, whatever was recorded",
       [](Line& line, const Value& v) { line.scale.no_clip = boolean(v); }},
      {"nonfinite", Kind::value, Section::scale, kMeasure, "POLICY",
       "a total that is NaN or inf: propagate (default), error, skip or zero",
       [](Line& line, const Value& v) {
         line.clip.nonfinite = choice<NonfinitePolicy>(v, {{"propagate", NonfinitePolicy::propagate},
                                                           {"error", NonfinitePolicy::error},
                                                           {"skip", NonfinitePolicy::skip},
                                                           {"zero", NonfinitePolicy::zero}});
       }},
      {"no-scale", Kind::flag, Section::scale, kMeasure, "", "leave out the division by tokens and experts",
       [](Line& line, const Value& v) { line.clip.no_scale = boolean(v); }},
      {"num-label-tokens", Kind::value, Section::scale, kMeasure, "N",
       "label tokens of the step, in all; auto: counted from its labels", num_label_tokens},
      {"ignore-index", Kind::value, Section::scale, kMeasure | kTokens, "N",
       "the label that does not count (default -100)",
       [](Line& line, const Value& v) { line.labels.ignore_index = integer(v, -(std::int64_t{1} << 62)); }},
      {"dp-axes", Kind::value, Section::scale, kMeasure | kTokens, "NAMES",
       "axes of the device mesh with labels of their own, for auto (default: dp,dp_replicate,dp_shard)",
       [](Line& line, const Value& v) {
         line.labels.dp_axes = parse_axes(v.text);
         if (line.labels.dp_axes.empty()) refuse(v, "names of axes, separated by commas");
       }},
      {"dp-group-size", Kind::value, Section::scale, kMeasure, "N", "size of the data-parallel group",
       [](Line& line, const Value& v) { line.scale.dp_group_size = integer(v, 1); }},
      {"expert-tp-replication-factor", Kind::value, Section::scale, kMeasure, "N", "factor of the expert divisor",
       [](Line& line, const Value& v) { line.scale.expert_tp_replication_factor = integer(v, 1); }},
      {"pp", Kind::toggle, Section::scale, kMeasure | kVerify, "", "whether the step ran with pipeline parallelism",
       [](Line& line, const Value& v) { line.scale.pp = boolean(v); }},
      {"pp-axis", Kind::value, Section::scale, kMeasure | kVerify | kTokens, "NAME",
       "pipeline dimension of the device mesh", [](Line& line, const Value& v) { line.scale.pp_axis = v.text; }},
      {"ep-axis", Kind::value, Section::scale, kMeasure | kVerify, "NAME", "expert dimension of the MoE mesh",
       [](Line& line, const Value& v) { line.scale.ep_axis = v.text; }},
      {"foreach", Kind::toggle, Section::scale, kMeasure, "", "as the step passed it",
       [](Line& line, const Value& v) { line.scale.foreach = boolean(v); }},
      {"use-torch-clip-grad-norm", Kind::toggle, Section::scale, kMeasure, "", "as the step passed it",
       [](Line& line, const Value& v) { line.scale.use_torch_clip_grad_norm = boolean(v); }},

      {"norm-type", Kind::value, Section::common, kMeasure | kVerify, "P", "p of the p-norm: a number above 0, or inf",
       [](Line& line, const Value& v) { line.scale.norm_type = norm_type(v); }},
      {"numerics", Kind::value, Section::common, kMeasure, "HOW",
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
      {"strict", Kind::flag, Section::common, kAll & ~(kInspect | kSynth | kDoctor), "",
       "findings exit 1, as those of verify, diff and check do anyway",
       [](Line& line, const Value& v) { line.common.strict = boolean(v); }},
      {"device", Kind::value, Section::common, kMeasure | kVerify | kAccumulate | kDoctor, "WHAT",
       "auto (default), cuda or cpu",
       [](Line& line, const Value& v) {
         line.common.device = choice<DeviceChoice>(
             v, {{"auto", DeviceChoice::automatic}, {"cuda", DeviceChoice::cuda}, {"cpu", DeviceChoice::cpu}});
       }},
      {"threads", Kind::value, Section::common, kAll & ~(kInspect | kTokens | kDoctor), "N",
       "of each process (default: its share of the processors)",
       [](Line& line, const Value& v) { line.common.threads = static_cast<std::size_t>(integer(v, 1, 65536)); }},
      {"memory-budget", Kind::value, Section::common, kAll & ~(kInspect | kSynth | kDoctor), "SIZE",
       "of each process: 4G, 512Mi (default: half the memory divided by the processes)",
       [](Line& line, const Value& v) {
         line.common.memory_budget = parse_size(v.text);
         if (!line.common.memory_budget) refuse(v, "a size such as 4G or 512Mi");
       }},
      {"device-memory-budget", Kind::value, Section::common, kMeasure, "SIZE",
       "of each process on its device (default: half of what is free, divided by the processes on it)",
       [](Line& line, const Value& v) {
         line.common.device_memory_budget = parse_size(v.text);
         if (!line.common.device_memory_budget) refuse(v, "a size such as 4G or 512Mi");
       }},
      {"offload", Kind::flag, Section::common, kMeasure, "",
       "one model part at a time on the device, the others in host memory",
       [](Line& line, const Value& v) { line.common.offload = boolean(v); }},
      {"locality", Kind::value, Section::common, kClip | kNorms, "HOW",
       "shared (default: every host sees every rank file), or files: each process serves files that its host sees",
       [](Line& line, const Value& v) {
         line.common.locality = choice<Locality>(v, {{"shared", Locality::shared}, {"files", Locality::files}});
       }},
      {"progress", Kind::toggle, Section::common, kAll & ~(kInspect | kTokens | kDoctor), "",
       "progress on stderr (default: if that is a terminal)",
       [](Line& line, const Value& v) { line.common.progress = boolean(v); }},
      {"timeout", Kind::value, Section::common, kAll, "SECONDS",
       "end the run if a process waits longer for the others (default: for ever)",
       [](Line& line, const Value& v) { line.common.timeout = std::chrono::seconds(integer(v, 1, 31'536'000)); }},
      {"quiet", Kind::flag, Section::common, kAll | kReport, "", "no text on stdout, no progress",
       [](Line& line, const Value& v) { line.common.quiet = boolean(v); }},
      {"color", Kind::value, Section::common, kAll | kReport, "WHEN", "auto (default), always or never",
       [](Line& line, const Value& v) {
         line.common.colour = choice<ColourChoice>(
             v, {{"auto", ColourChoice::automatic}, {"always", ColourChoice::always}, {"never", ColourChoice::never}});
       }},
  };
}

}  // namespace gradclip
