#include "gradclip/clip/clip.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "gradclip/clip/continued_run.hpp"
#include "gradclip/clip/recorded.hpp"
#include "gradclip/clip/second_pass.hpp"
#include "gradclip/norm/shard_sums.hpp"
#include "gradclip/writing/joint_dump.hpp"

namespace gradclip {
namespace {

/// What clip_grad_norm_ adds to the total before it divides.
constexpr double kEpsilon = 1e-6;

/// The factors of every element once the totals are known.
class ClipFactors {
 public:
  ClipFactors(const Manifest& manifest, const ScalePlan& scale, const ClipResult& result, Numerics numerics)
      : manifest_(manifest), scale_(scale), result_(result), numerics_(numerics) {}

  ScaleFactors operator()(std::size_t parameter, std::int32_t rank) const {
    ScaleFactors factors = scale_.factors.of[parameter];
    factors.zero_nonfinite = scale_.factors.zero_nonfinite;
    const std::optional<double> coefficient = coefficient_of(rank);
    if (!coefficient || result_.skipped) return factors;
    const ParameterEntry& entry = manifest_.parameters[parameter];
    // PyTorch's promotion: a 0-dim gradient times the 0-dim float64 coefficient is formed in float64. A piece of a
    // flattened parameter has one dimension, whatever the parameter has.
    const bool in_float64 = entry.shape.empty() && entry.flat_ranges.empty() && entry.dtype != DType::float64 &&
                            numerics_ != Numerics::torch;
    factors.clip = in_float64 ? ClipStep::in_float64 : ClipStep::in_gradient_precision;
    factors.coefficient = *coefficient;
    if (!in_float64 && entry.dtype != DType::float64) factors.coefficient = narrowed(*coefficient, entry.dtype);
    return factors;
  }

 private:
  [[nodiscard]] std::optional<double> coefficient_of(std::int32_t rank) const {
    if (!result_.max_norm) return std::nullopt;
    if (result_.coefficients.empty()) return result_.coefficient;
    const std::int32_t total = result_.norm->reference.total_of_rank[static_cast<std::size_t>(rank)];
    return total < 0 ? 1.0 : result_.coefficients[static_cast<std::size_t>(total)];
  }

  [[nodiscard]] double narrowed(double coefficient, DType dtype) const {
    const bool half = dtype == DType::float16 || dtype == DType::bfloat16;
    if (numerics_ == Numerics::automodel && half) return round_through(dtype, coefficient);
    return round_through(DType::float32, coefficient);
  }

  const Manifest& manifest_;
  const ScalePlan& scale_;
  const ClipResult& result_;
  Numerics numerics_;
};

std::string number(const std::optional<double>& value) {
  return value ? json_number(*value) : "null";
}

/// What the output's manifest says of the run: nothing that differs between two runs of the same command.
std::string clip_record(const TrainingStep& step, const ClipOptions& options, const ClipResult& result) {
  std::string record = fmt::format(
      R"({{"version":"{}","norm_type":{},"max_norm":{},"total":{},"coefficient":{},"total_after":{},"numerics":"{}",)"
      R"("nonfinite":"{}","label_token_divisor":{},"expert_divisor":{})",
      GRADCLIP_VERSION, json_number(step.order.p), number(result.max_norm), json_number(result.total),
      number(result.skipped ? std::nullopt : result.coefficient), number(result.total_after), name(options.numerics),
      name(options.nonfinite), number(result.scale.label_token_divisor), number(result.scale.expert_divisor));
  if (options.total_norm) record += R"(,"total_given":true)";
  for (std::size_t i = 0; i < result.coefficients.size(); ++i) {
    const RankTotal& total = result.norm->reference.totals[i];
    record += fmt::format(R"({}{{"total":{},"coefficient":{},"ranks":[{}]}})", i == 0 ? R"(,"totals":[)" : ",",
                          json_number(total.total), json_number(result.coefficients[i]), fmt::join(total.ranks, ","));
  }
  return record + (result.coefficients.empty() ? "}" : "]}");
}

/// Of the tensor that would have held a total that was given: torch.stack promotes the norms of all gradients.
DType type_of_torch_total(const Manifest& manifest) {
  if (manifest.parameters.empty()) return DType::float32;
  DType type = manifest.parameters.front().dtype;
  for (const ParameterEntry& entry : manifest.parameters) type = promoted(type, entry.dtype);
  return type;
}

/// Step 3 and 4: coefficients from the totals, and what a non-finite total leads to.
void decide(const Manifest& manifest, const TrainingStep& step, const ClipOptions& options, ClipResult& result) {
  result.max_norm = step.max_norm;
  const bool by_rank = result.norm && options.numerics != Numerics::exact;
  bool finite = std::isfinite(result.total);
  if (by_rank) {
    const std::vector<RankTotal>& totals = result.norm->reference.totals;
    finite = std::all_of(totals.begin(), totals.end(), [](const RankTotal& t) { return std::isfinite(t.total); });
    if (totals.size() == 1) result.total = totals.front().total;
    if (step.max_norm) {
      for (const RankTotal& total : totals) {
        result.coefficients.push_back(
            clip_coefficient(total.total, *step.max_norm, total.dtype, /*as_reference=*/true));
      }
      if (totals.size() == 1) result.coefficient = result.coefficients.front();
    }
  } else if (step.max_norm) {
    const bool as_reference = options.numerics != Numerics::exact;
    const DType dtype = options.numerics == Numerics::torch ? type_of_torch_total(manifest) : DType::float64;
    result.coefficient = clip_coefficient(round_through(dtype, result.total), *step.max_norm, dtype, as_reference);
  }
  result.refused = !finite && options.nonfinite == NonfinitePolicy::error;
  result.skipped = !finite && options.nonfinite == NonfinitePolicy::skip;
  const auto below_one = [](double coefficient) { return !(coefficient >= 1.0); };
  result.clipped = !result.skipped && !result.refused &&
                   ((result.coefficient && below_one(*result.coefficient)) ||
                    std::any_of(result.coefficients.begin(), result.coefficients.end(), below_one));
}

/// What a total that is not finite does to the gradients is told where the total is; one that was given is a finding.
void report_effect(const ClipOptions& options, ClipResult& result, bool writes) {
  if (std::isfinite(result.total)) return;
  const bool nan = std::isnan(result.total);
  const char* effect = !writes || !result.clipped ? ""
                       : nan                      ? ": every gradient becomes NaN"
                                                  : ": every gradient becomes 0";
  if (!options.total_norm) {
    for (Finding& finding : result.norm->findings) {
      if (finding.kind == "total-nonfinite") finding.message += effect;
    }
    return;
  }
  result.findings.push_back(
      {.kind = "total-nonfinite",
       .parameter = {},
       .ranks = {},
       .index = {},
       .value = result.total,
       .message = fmt::format("the total norm that was given is {}{}", nan ? "NaN" : "infinite", effect)});
}

/// Before anything is written: a factor on each addend is not a factor on their product.
void refuse_products(const Manifest& manifest, const TrainingStep& step, const ClipResult& result) {
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const ParameterEntry& entry = manifest.parameters[p];
    const bool changes = (step.max_norm && !result.skipped) || changes_bits(result.scale.factors.of[p]);
    const bool product = std::any_of(entry.layout().begin(), entry.layout().end(), [](const Placement& placement) {
      return placement.kind == Placement::Kind::partial && placement.operation == PartialOperation::product;
    });
    if (!product || !changes) continue;
    throw Error(ExitCode::bad_input, {.where = "parameter " + gradclip::quoted(entry.name),
                                      .found = "Partial(product)",
                                      .expected = "sum, avg, max or min where gradients are scaled or clipped",
                                      .advice = "it can be measured with norms --no-scale"});
  }
}

}  // namespace

std::string_view name(NonfinitePolicy policy) noexcept {
  switch (policy) {
    case NonfinitePolicy::propagate:
      return "propagate";
    case NonfinitePolicy::error:
      return "error";
    case NonfinitePolicy::skip:
      return "skip";
    case NonfinitePolicy::zero:
      return "zero";
  }
  return "propagate";
}

double clip_coefficient(double total, double max_norm, DType dtype, bool as_reference) {
  if (std::isnan(total)) return std::numeric_limits<double>::quiet_NaN();
  if (std::isinf(max_norm) && !as_reference) return 1.0;
  const auto rounded = [dtype](double value) { return round_through(dtype, value); };
  // A number beside a tensor takes the type that the tensor is computed in.
  const double limit = dtype == DType::float64 ? max_norm : round_through(DType::float32, max_norm);
  const double coefficient = rounded(rounded(1.0 / rounded(total + kEpsilon)) * limit);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

void clip_grad_norm_impl(Run& run, const TrainingStep& step, const ClipOptions& options, DumpWriter* output,
                         ClipResult& result) {
  decide(run.dump.manifest(), step, options, result);
  report_effect(options, result, output != nullptr);
  if (output == nullptr || result.refused) return;
  refuse_products(run.dump.manifest(), step, result);
  const ClipFactors factors(run.dump.manifest(), result.scale, result, options.numerics);
  const std::string decided = clip_record(step, options, result);  // all but what is measured on the output
  const auto write_mine = [&] {
    SecondPass written = write_clipped(run, *output, factors, result.scale.factors.expert, result.order);
    result.total_after = written.total;
    return std::move(written.files);
  };
  const auto text_of = [&](const std::map<std::string, FileRecord>& files) {
    return output->manifest_with(
        {.state = GradientState::after_clip, .files = files, .clip_record = clip_record(step, options, result)});
  };
  const bool prepares = run.comm.process() == 0 && !output->several();
  const std::string identity =
      prepares ? run_identity(run.dump, factors, result.scale.factors.expert, decided) : std::string();
  for (const WrittenRank& file : write_jointly(run.comm, *output, run.dump.manifest(), identity, write_mine, text_of)) {
    result.kept_files += file.kept;
  }
}

ClipResult scale_grads_and_clip_grad_norm(Run& run, const TrainingStep& step, const ClipOptions& options,
                                          DumpWriter* output) {
  const Manifest& manifest = run.dump.manifest();
  if (output != nullptr && manifest.state == GradientState::after_clip && !options.no_scale) {
    throw Error(ExitCode::bad_input, {.where = "manifest.json, state",
                                      .found = "\"after_clip\": these gradients are clipped already",
                                      .expected = "before_scale or before_clip",
                                      .advice = "use --no-scale to clip them once more"});
  }
  const PipelineView pipeline = pipeline_view(manifest, step);
  const EffectiveNumerics effective = effective_numerics(manifest, step, options.numerics);
  ClipOptions taken = options;
  taken.numerics = effective.numerics;
  ClipResult result;
  result.order = step.order;
  result.scale = plan_scaling(manifest, step, taken.numerics, taken.no_scale);
  result.scale.factors.zero_nonfinite = options.nonfinite == NonfinitePolicy::zero;
  if (options.total_norm) {
    result.total = *options.total_norm;
  } else {
    result.norm = measure_gradients(run, result.scale.factors, step.order, taken.numerics, pipeline, taken.histograms);
    run.dump.require_unchanged();
    result.norm->reference.note = effective.note;
    result.total = result.norm->total;
    report_recorded(manifest, step, taken, *result.norm);
  }
  clip_grad_norm_impl(run, step, taken, output, result);
  return result;
}

ClipResult clip_grad_norm(Run& run, const TrainingStep& step, ClipOptions options, DumpWriter* output) {
  options.no_scale = true;
  return scale_grads_and_clip_grad_norm(run, step, options, output);
}

}  // namespace gradclip
