#include "gradclip/clip/recorded.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "gradclip/base/precision.hpp"

namespace gradclip {
namespace {

/// Frameworks form norms in float32 at least, or in the gradients' own type.
double limit_of(const Manifest& manifest) {
  double limit = 1e-3;
  for (const ParameterEntry& entry : manifest.parameters) {
    const DType formed_in = is_float8(entry.dtype) ? DType::bfloat16 : entry.dtype;  // float8 has no norm of its own
    limit = std::max(limit, epsilon_of(formed_in));
  }
  return limit;
}

/// The divisor of experts is a size of their mesh, which a merged dump has not.
bool has_lost_a_divisor(const Manifest& manifest, const TrainingStep& step) {
  if (!manifest.merged || manifest.state != GradientState::before_scale) return false;
  return std::any_of(manifest.parameters.begin(), manifest.parameters.end(),
                     [&](const ParameterEntry& parameter) { return manifest.is_expert(parameter, step.ep_axis_name); });
}

bool measures_what_was_recorded(const Manifest& manifest, const TrainingStep& step, const ClipOptions& options) {
  if (manifest.state == GradientState::after_clip || manifest.microbatch || options.no_scale) return false;
  if (has_lost_a_divisor(manifest, step)) return false;
  const TrainingStep recorded = recorded_step(manifest);
  return step.order.p == recorded.order.p && step.pp_enabled == recorded.pp_enabled &&
         (!step.pp_enabled || step.pp_axis_name == recorded.pp_axis_name) &&
         step.ep_axis_name == recorded.ep_axis_name && step.num_label_tokens == recorded.num_label_tokens &&
         step.dp_group_size == recorded.dp_group_size &&
         step.expert_tp_replication_factor == recorded.expert_tp_replication_factor;
}

}  // namespace

void report_recorded(const Manifest& manifest, const TrainingStep& step, const ClipOptions& options,
                     NormResult& result) {
  const std::optional<double> recorded = manifest.training.grad_norm;
  if (!recorded || !measures_what_was_recorded(manifest, step, options)) return;
  if (has_kind(result.findings, "nonfinite") || result.statistics.elements == 0 || !std::isfinite(result.total)) return;
  std::vector<double> totals{result.total};
  for (const RankTotal& seen : result.reference.totals) totals.push_back(seen.total);
  Finding finding{
      .kind = "recorded-differs", .parameter = {}, .ranks = {}, .index = {}, .value = *recorded, .message = {}};
  if (!std::isfinite(*recorded)) {
    const bool explained =
        std::any_of(totals.begin(), totals.end(), [](double total) { return !std::isfinite(total); });
    if (explained) return;
    finding.message = fmt::format(
        "the step logged {}, but every recorded gradient is finite: it arose after recording, or in the step's own "
        "arithmetic",
        std::isnan(*recorded) ? "NaN" : "an infinite norm");
  } else {
    const double limit = limit_of(manifest);
    double nearest = result.total;
    for (const double total : totals) {
      if (std::abs(total - *recorded) < std::abs(nearest - *recorded)) nearest = total;
    }
    const double apart = std::abs(nearest - *recorded);
    if (apart <= limit * std::max(std::abs(*recorded), std::abs(nearest))) return;
    finding.message = fmt::format(
        "the step logged the norm {:.9g}, and the nearest total of the recorded gradients is {:.9g}: they were "
        "recorded elsewhere in the step, or are not all of what it clipped",
        *recorded, nearest);
  }
  result.findings.push_back(std::move(finding));
}

}  // namespace gradclip
