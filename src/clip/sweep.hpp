#pragma once
// What several max_norms would have done to the gradients of several steps.

#include <cstdint>
#include <span>
#include <vector>

#include "gradclip/clip/clip.hpp"

namespace gradclip {

/// The total norm of one step.
struct StepTotal {
  double total = 0.0;             ///< exact
  std::vector<RankTotal> totals;  ///< that ranks would have used, in an arithmetic that is not exact; else empty

  [[nodiscard]] bool finite() const noexcept;
};

/// The totals of a result that has a norm.
/// @param numerics  as it was asked for
[[nodiscard]] StepTotal step_total(const ClipResult& result, Numerics numerics);

/// The coefficient that max_norm gives the step: clip_coefficient(), the smallest where ranks have several.
[[nodiscard]] double step_coefficient(const StepTotal& step, double max_norm);

/// One max_norm over all steps whose total is finite.
struct SweepLine {
  double max_norm = 0.0;
  std::uint64_t steps = 0;    ///< with a finite total
  std::uint64_t clipped = 0;  ///< of them, with a coefficient below 1
  /// Of the coefficients of all of them, 1 where a step is not clipped; NaN without a step.
  double least = 0.0;
  double median = 0.0;  ///< of an even number: half the sum of the two in the middle
  double mean = 0.0;
};

/// One line for each max_norm, in their order.
[[nodiscard]] std::vector<SweepLine> sweep(std::span<const StepTotal> steps, std::span<const double> max_norms);

}  // namespace gradclip
