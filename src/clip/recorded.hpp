#pragma once
// What the training step logged against what its gradients give.

#include "gradclip/clip/clip.hpp"

namespace gradclip {

/// Appends `recorded-differs` to the result's findings where training.grad_norm is none of the totals, exact or as any
/// recorded rank saw it, within what the gradients' own type can round; or is not finite though every gradient is.
/// Nothing where the two do not mean the same: another norm type, scale or pipeline than the recorded, clipped
/// gradients, or gradients that are not finite, which have findings of their own.
void report_recorded(const Manifest& manifest, const TrainingStep& step, const ClipOptions& options,
                     NormResult& result);

}  // namespace gradclip
