#pragma once
// Scaling, the total norm and clipping, under the names of NeMo Automodel's training.utils.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/clip/scale.hpp"
#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/norm/total_norm.hpp"

namespace gradclip {

/// What a total that is NaN or infinite leads to.
enum class NonfinitePolicy : std::uint8_t { propagate, error, skip, zero };
[[nodiscard]] std::string_view name(NonfinitePolicy policy) noexcept;

struct ClipOptions {
  Numerics numerics = Numerics::exact;
  NonfinitePolicy nonfinite = NonfinitePolicy::propagate;
  bool no_scale = false;
  bool histograms = false;  ///< count elements by exponent too
  /// Use this total and skip the first pass; statistics are then absent from the result.
  std::optional<double> total_norm;
};

struct ClipResult {
  ScalePlan scale;
  std::optional<NormResult> norm;  ///< empty if options.total_norm was given
  NormOrder order;
  double total = 0.0;  ///< the total that `coefficient` comes from where there is one
  std::optional<double> max_norm;
  /// min(1, max_norm / (total + 1e-6)); empty if nothing is clipped or ranks have several.
  std::optional<double> coefficient;
  std::vector<double> coefficients;   ///< of reference.totals, in their order, where the numerics is not exact
  bool clipped = false;               ///< whether a coefficient below 1 was applied
  bool skipped = false;               ///< non-finite total under NonfinitePolicy::skip: scaled, not clipped
  bool refused = false;               ///< non-finite total under NonfinitePolicy::error: no gradients were written
  std::vector<Finding> findings;      ///< of a run that measures nothing: else they are `norm`'s
  std::optional<double> total_after;  ///< measured on what was written
  std::uint32_t kept_files = 0;       ///< rank files that an interrupted run had written
};

/// min(1, max_norm / (total + 1e-6)), NaN stays NaN, by the operations of torch.nn.utils.clip_grads_with_norm_ on a
/// total of type `dtype`: a sum, a reciprocal, a product (Tensor.__rdiv__), a clamp, each rounded to the type. An
/// infinite max_norm gives 1, where the reference gives NaN for an infinite total; `as_reference` follows it.
[[nodiscard]] double clip_coefficient(double total, double max_norm, DType dtype = DType::float64,
                                      bool as_reference = false);

/// Reference: scale_grads_and_clip_grad_norm(max_grad_norm, model_parts, ...): label-token and expert scaling, then
/// clip_grad_norm. What differs: it reads shards and writes new ones instead of changing gradients in place; without a
/// max_norm nothing is clipped but the total is still measured (the reference returns 0.0); what every recorded rank
/// saw is part of the result; a given total can stand in for the first pass.
/// @param output  where the clipped dump goes, not yet prepared; null: gradients are measured only. On any error
/// nothing is
///                left of it. Collective; every process gets the same result.
[[nodiscard]] ClipResult scale_grads_and_clip_grad_norm(Run& run, const TrainingStep& step, const ClipOptions& options,
                                                        DumpWriter* output);

/// Reference: clip_grad_norm(max_grad_norm, model_parts, ...): the same without scaling. The reference takes PyTorch's
/// own clip_grad_norm_ where use_torch_clip_grad_norm is set and there is neither a DTensor nor pp; here that is
/// Numerics::torch, taken under the same conditions.
[[nodiscard]] ClipResult clip_grad_norm(Run& run, const TrainingStep& step, ClipOptions options, DumpWriter* output);

/// Reference: _clip_grad_norm_impl(parameters, max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh), after its
/// first half: clips with totals that are known. `result` brings the totals and receives coefficients, total_after,
/// flags and a finding. foreach has no counterpart: it changes no bit.
void clip_grad_norm_impl(Run& run, const TrainingStep& step, const ClipOptions& options, DumpWriter* output,
                         ClipResult& result);

}  // namespace gradclip
