#include "gradclip/clip/scale.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace gradclip {
namespace {

void refuse(ExitCode code, const char* what, std::string found, const char* expected) {
  const bool from_manifest = code == ExitCode::bad_input;
  throw Error(code, {.where = from_manifest ? fmt::format("manifest.json, training.{}", what) : std::string(what),
                     .found = std::move(found),
                     .expected = expected,
                     .advice = from_manifest ? "the command line can set another value" : ""});
}

/// "'a', 'b'": each once.
std::string quoted_once(const std::vector<std::string>& names) {
  std::vector<std::string> texts;
  for (const std::string& name : names) {
    const std::string text = quoted(name);
    if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(text);
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

/// ep_shard's size in the MoE meshes; 1 where they have no such dimension.
std::int64_t ep_shard_size(const Manifest& manifest) {
  std::optional<std::int64_t> size;
  for (const std::size_t index : manifest.moe_meshes) {
    const DeviceMesh& mesh = manifest.meshes[index];
    const std::optional<std::size_t> dimension = mesh.dimension("ep_shard");
    const std::int64_t here = dimension ? mesh.shape()[*dimension] : 1;
    if (size && *size != here) {
      throw Error(ExitCode::bad_input,
                  {.where = fmt::format("manifest.json, moe_mesh {}", quoted(mesh.name())),
                   .found = fmt::format("an ep_shard dimension of size {}", here),
                   .expected = fmt::format("{}, as in the other stages' MoE meshes", *size),
                   .advice = "one expert divisor must serve all experts; use --no-scale for already scaled gradients"});
    }
    size = here;
  }
  return size.value_or(1);
}

/// One division as the numerics does it: the number as the element's arithmetic sees it.
void append_step(ScaleFactors& factors, double divisor, DType dtype, Numerics numerics) {
  const std::size_t place = factors.steps[0] == ScaleStep::none ? 0 : 1;
  const bool reciprocal = numerics == Numerics::automodel;  // CUDA multiplies by the reciprocal of a number
  const double number = reciprocal ? 1.0 / divisor : divisor;
  factors.steps[place] = reciprocal ? ScaleStep::multiply : ScaleStep::divide;
  factors.numbers[place] = dtype == DType::float64 ? number : static_cast<double>(static_cast<float>(number));
}

/// Why label tokens that are known do not divide; empty where they do, or where none are known.
std::string_view why_not_by_tokens(const TrainingStep& step, const ScalePlan& plan) {
  if (plan.label_token_divisor || step.num_label_tokens.value_or(0) == 0) return {};
  return step.pp_enabled ? "label tokens divide only where the data-parallel size is known"
                         : "label tokens divide with pipeline parallelism only";
}

std::string explain(const TrainingStep& step, const ScalePlan& plan, std::int64_t ep_shard) {
  std::string text;
  if (plan.label_token_divisor) {
    text = fmt::format("all gradients / {:.9g} ({} label tokens / data-parallel size {})", *plan.label_token_divisor,
                       *step.num_label_tokens, *step.dp_group_size);
  }
  if (plan.expert_divisor) {
    text += fmt::format("{}expert gradients / {:.9g} (data-parallel size {} / ep_shard {}", text.empty() ? "" : ", ",
                        *plan.expert_divisor, *step.dp_group_size, ep_shard);
    if (step.expert_tp_replication_factor != 1) text += fmt::format(" × {}", step.expert_tp_replication_factor);
    text += ")";
  }
  const std::string_view why_not = why_not_by_tokens(step, plan);
  if (text.empty()) return why_not.empty() ? "none" : fmt::format("none ({})", why_not);
  return why_not.empty() ? text : fmt::format("{}; {}", text, why_not);
}

void require_axis(const char* option, const std::string& axis, std::span<const DeviceMesh> meshes, const char* of) {
  std::vector<std::string> names;
  for (const DeviceMesh& mesh : meshes) {
    if (mesh.dimension(axis)) return;
    names.insert(names.end(), mesh.dim_names().begin(), mesh.dim_names().end());
  }
  throw Error(ExitCode::usage, {.where = option,
                                .found = quoted(axis),
                                .expected = names.empty() ? "none: the dump has no mesh"
                                                          : fmt::format("an axis of {}: {}", of, quoted_once(names)),
                                .advice = {}});
}

}  // namespace

void check_step(const TrainingStep& step, ExitCode code) {
  if (!(step.order.p > 0.0)) refuse(code, "norm_type", fmt::format("{}", step.order.p), "a number above 0, or inf");
  if (step.order.p > kLargestOrder && !step.order.infinite()) {
    refuse(code, "norm_type", fmt::format("{}", step.order.p), "a number up to 1000, or inf");
  }
  if (step.max_norm && !(*step.max_norm >= 0.0)) {
    refuse(code, "max_grad_norm", fmt::format("{}", *step.max_norm), "a number of 0 or more");
  }
  if (step.dp_group_size && *step.dp_group_size <= 0) {
    refuse(code, "dp_group_size", fmt::format("{}", *step.dp_group_size), "1 or more");
  }
  if (step.num_label_tokens && *step.num_label_tokens < 0) {
    refuse(code, "num_label_tokens", fmt::format("{}", *step.num_label_tokens), "0 or more");
  }
  if (step.expert_tp_replication_factor < 1) {
    refuse(code, "expert_tp_replication_factor", fmt::format("{}", step.expert_tp_replication_factor), "1 or more");
  }
}

void require_ep_axis(const Manifest& manifest, const std::string& axis) {
  require_axis("--ep-axis", axis, manifest.meshes, "a mesh");
}

void require_pp_axis(const Manifest& manifest, const std::string& axis) {
  if (!manifest.device_mesh) return require_axis("--pp-axis", axis, manifest.meshes, "a mesh");
  require_axis("--pp-axis", axis, std::span(&manifest.meshes[*manifest.device_mesh], 1), "the device mesh");
}

TrainingStep recorded_step(const Manifest& manifest) {
  const TrainingRecord& record = manifest.training;
  TrainingStep step;
  step.max_norm = record.max_grad_norm;
  step.order.p = record.norm_type.value_or(2.0);
  step.pp_enabled = record.pp_enabled.value_or(false);
  step.pp_axis_name = record.pp_axis_name.value_or("pp");
  step.ep_axis_name = record.ep_axis_name.value_or("");
  step.num_label_tokens = record.num_label_tokens;
  step.dp_group_size = record.dp_group_size;
  step.expert_tp_replication_factor = record.expert_tp_replication_factor.value_or(1);
  step.foreach = record.foreach.value_or(true);
  step.use_torch_clip_grad_norm = record.use_torch_clip_grad_norm.value_or(false);
  return step;
}

ScalePlan plan_scaling(const Manifest& manifest, const TrainingStep& step, Numerics numerics, bool no_scale) {
  ScalePlan plan;
  const bool applies = manifest.state == GradientState::before_scale && !no_scale;
  if (applies && step.pp_enabled && step.num_label_tokens && step.dp_group_size && *step.num_label_tokens != 0) {
    plan.label_token_divisor = static_cast<double>(*step.num_label_tokens) / static_cast<double>(*step.dp_group_size);
  }
  std::vector<bool>& expert = plan.factors.expert;
  expert.reserve(manifest.parameters.size());
  for (const ParameterEntry& parameter : manifest.parameters) {
    expert.push_back(manifest.is_expert(parameter, step.ep_axis_name));
  }
  const bool experts = std::find(expert.begin(), expert.end(), true) != expert.end();
  std::int64_t ep_shard = 1;
  if (applies && experts && !manifest.moe_meshes.empty() && step.dp_group_size) {
    ep_shard = ep_shard_size(manifest);
    plan.expert_divisor = static_cast<double>(*step.dp_group_size) / static_cast<double>(ep_shard) *
                          static_cast<double>(step.expert_tp_replication_factor);
  }
  if (!applies) {
    plan.explanation =
        no_scale ? "none (--no-scale)" : fmt::format("none (the dump's state is {})", name(manifest.state));
  } else {
    plan.explanation = explain(step, plan, ep_shard);
  }

  plan.factors.of.reserve(manifest.parameters.size());
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const DType dtype = manifest.parameters[p].dtype;
    ScaleFactors factors;
    if (plan.label_token_divisor) append_step(factors, *plan.label_token_divisor, dtype, numerics);
    if (plan.expert_divisor && expert[p]) append_step(factors, *plan.expert_divisor, dtype, numerics);
    plan.factors.of.push_back(factors);
  }
  return plan;
}

EffectiveNumerics effective_numerics(const Manifest& manifest, const TrainingStep& step, Numerics asked_for) {
  const bool sharded = std::any_of(manifest.parameters.begin(), manifest.parameters.end(),
                                   [](const ParameterEntry& parameter) { return parameter.mesh.has_value(); });
  const bool torch_applies = !sharded && !step.pp_enabled;
  if (asked_for == Numerics::torch && !torch_applies) {
    return {Numerics::automodel_cpu, sharded ? "torch's own clip_grad_norm_ is not taken where gradients are DTensors"
                                             : "torch's own clip_grad_norm_ is not taken with pipeline parallelism"};
  }
  const bool automodel = asked_for == Numerics::automodel || asked_for == Numerics::automodel_cpu;
  if (automodel && step.use_torch_clip_grad_norm && torch_applies) {
    return {Numerics::torch, "the step was told to use torch's own clip_grad_norm_"};
  }
  return {asked_for, {}};
}

PipelineView pipeline_view(const Manifest& manifest, const TrainingStep& step) {
  if (!step.pp_enabled) return {};
  if (!manifest.device_mesh) {
    throw Error(ExitCode::bad_input, {.where = "manifest.json, device_mesh",
                                      .found = "no device mesh, but pipeline parallelism is on",
                                      .expected = fmt::format("a mesh with the axis {}", quoted(step.pp_axis_name)),
                                      .advice = "use --no-pp if the job had no pipeline stages"});
  }
  const DeviceMesh& mesh = manifest.meshes[*manifest.device_mesh];
  const std::optional<std::size_t> dimension = mesh.dimension(step.pp_axis_name);
  if (!dimension) {
    throw Error(ExitCode::bad_input, {.where = fmt::format("manifest.json, mesh {}", quoted(mesh.name())),
                                      .found = fmt::format("the axes {}", quoted_once(mesh.dim_names())),
                                      .expected = fmt::format("the pipeline axis {}", quoted(step.pp_axis_name)),
                                      .advice = "name it with --pp-axis, or use --no-pp"});
  }
  return {true, *manifest.device_mesh, *dimension};
}

}  // namespace gradclip
