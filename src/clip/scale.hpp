#pragma once
// What gradients are divided by before they are clipped: label tokens and the expert ratio.

#include <cstdint>
#include <optional>
#include <string>

#include "gradclip/dump/manifest.hpp"
#include "gradclip/norm/total_norm.hpp"

namespace gradclip {

/// The training step's numbers: the manifest's "training" with the command line's on top.
struct TrainingStep {
  std::optional<double> max_norm;  ///< empty: nothing is clipped
  NormOrder order;
  bool pp_enabled = false;
  std::string pp_axis_name = "pp";
  std::string ep_axis_name;  ///< empty: no expert axis
  std::optional<std::int64_t> num_label_tokens;
  std::optional<std::int64_t> dp_group_size;
  std::int64_t expert_tp_replication_factor = 1;
  bool foreach = true;
  bool use_torch_clip_grad_norm = false;
};

/// The manifest's "training" with its defaults, unchecked: the command line may replace what cannot be.
[[nodiscard]] TrainingStep recorded_step(const Manifest& manifest);

/// Above this p the powers of a chunk's largest element underflow; the norm is its largest magnitude to 4 % there.
inline constexpr double kLargestOrder = 1000.0;

/// Refuses a value that cannot be: p <= 0 or between kLargestOrder and infinity, a negative or NaN max_norm,
/// dp_group_size <= 0, negative num_label_tokens, a replication factor < 1. @param code  usage or bad_input: where the
/// value comes from
void check_step(const TrainingStep& step, ExitCode code);

/// Refuse the expert axis of a command line where no mesh has it; the pipeline axis where the device mesh has not, or,
/// without one, no mesh. Errors: Error(usage) that names the axes there are.
void require_ep_axis(const Manifest& manifest, const std::string& axis);
void require_pp_axis(const Manifest& manifest, const std::string& axis);

struct ScalePlan {
  std::optional<double> label_token_divisor;  ///< num_label_tokens / dp_group_size
  /// dp_group_size / ep_shard_size × expert_tp_replication_factor; empty where no parameter is an expert
  std::optional<double> expert_divisor;
  std::string explanation;  ///< one sentence for people
  ParameterFactors factors;
};

/// The factors of every parameter. Scaling is applied to a dump in the state before_scale, unless `no_scale`.
/// Errors: Error(bad_input) if there are experts whose divisor the stages' MoE meshes disagree on, by ep_shard.
[[nodiscard]] ScalePlan plan_scaling(const Manifest& manifest, const TrainingStep& step, Numerics numerics,
                                     bool no_scale);

/// The numerics that a run really takes, and why if it is not the one asked for.
struct EffectiveNumerics {
  Numerics numerics = Numerics::exact;
  std::string note;
};

/// torch's own clip_grad_norm_ is for plain tensors without pp: asked for elsewhere, automodel_cpu is taken. There, a
/// step with use_torch_clip_grad_norm takes it under automodel and automodel_cpu too, as the reference does.
[[nodiscard]] EffectiveNumerics effective_numerics(const Manifest& manifest, const TrainingStep& step,
                                                   Numerics asked_for);

/// Which ranks' totals are combined over pipeline stages.
/// Errors: Error(bad_input) where pp is on without its axis in the device mesh.
[[nodiscard]] PipelineView pipeline_view(const Manifest& manifest, const TrainingStep& step);

}  // namespace gradclip
