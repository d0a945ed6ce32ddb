#include "gradclip/clip/sweep.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace gradclip {
namespace {

SweepLine line_of(double max_norm, std::vector<double> coefficients) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  SweepLine line{max_norm, coefficients.size(), 0, kNan, kNan, kNan};
  if (coefficients.empty()) return line;
  line.clipped = static_cast<std::uint64_t>(
      std::count_if(coefficients.begin(), coefficients.end(), [](double coefficient) { return coefficient < 1.0; }));
  const double sum = std::accumulate(coefficients.begin(), coefficients.end(), 0.0);
  line.mean = sum / static_cast<double>(coefficients.size());
  std::sort(coefficients.begin(), coefficients.end());
  line.least = coefficients.front();
  const std::size_t middle = coefficients.size() / 2;
  line.median =
      coefficients.size() % 2 == 1 ? coefficients[middle] : (coefficients[middle - 1] + coefficients[middle]) / 2.0;
  return line;
}

}  // namespace

bool StepTotal::finite() const noexcept {
  return std::isfinite(total) &&
         std::all_of(totals.begin(), totals.end(), [](const RankTotal& seen) { return std::isfinite(seen.total); });
}

StepTotal step_total(const ClipResult& result, Numerics numerics) {
  StepTotal step{result.norm->total, {}};
  if (numerics != Numerics::exact) step.totals = result.norm->reference.totals;
  return step;
}

double step_coefficient(const StepTotal& step, double max_norm) {
  if (step.totals.empty()) return clip_coefficient(step.total, max_norm);
  double least = 1.0;
  for (const RankTotal& seen : step.totals) {
    least = std::min(least, clip_coefficient(seen.total, max_norm, seen.dtype, /*as_reference=*/true));
  }
  return least;
}

std::vector<SweepLine> sweep(std::span<const StepTotal> steps, std::span<const double> max_norms) {
  std::vector<SweepLine> lines;
  for (const double max_norm : max_norms) {
    std::vector<double> coefficients;
    for (const StepTotal& step : steps) {
      if (step.finite()) coefficients.push_back(step_coefficient(step, max_norm));
    }
    lines.push_back(line_of(max_norm, std::move(coefficients)));
  }
  return lines;
}

}  // namespace gradclip
