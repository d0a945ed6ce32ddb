#include "gradclip/norm/statistics.hpp"

#include <algorithm>
#include <cmath>

namespace gradclip {

ScaledSum add(ScaledSum a, ScaledSum b, double power) noexcept {
  if (b.sum == 0.0) return a;
  if (a.sum == 0.0) return b;
  if (a.exponent == b.exponent) return {a.sum + b.sum, a.exponent};
  const bool rescale_b = b.exponent < a.exponent;
  const ScaledSum& small = rescale_b ? b : a;
  const ScaledSum& large = rescale_b ? a : b;
  const double shift = power * (static_cast<double>(small.exponent) - static_cast<double>(large.exponent));
  // 2^shift far below any float64: the smaller one is lost whole, and ldexp takes an int.
  double rescaled = 0.0;
  if (shift > -4000.0) {
    rescaled =
        shift == std::rint(shift) ? std::ldexp(small.sum, static_cast<int>(shift)) : small.sum * std::exp2(shift);
  }
  return {rescale_b ? large.sum + rescaled : rescaled + large.sum, large.exponent};
}

double root(ScaledSum powers, NormOrder order) noexcept {
  if (powers.sum == 0.0) return 0.0;
  double base = 0.0;
  if (order.p == 1.0) {
    base = powers.sum;
  } else if (order.p == 2.0) {
    base = std::sqrt(powers.sum);
  } else if (order.p == 4.0) {
    base = std::sqrt(std::sqrt(powers.sum));
  } else {
    base = std::pow(powers.sum, 1.0 / order.p);
  }
  return std::ldexp(base, powers.exponent);
}

ScaledSum power_of(double norm, NormOrder order) noexcept {
  if (!(norm > 0.0) || !std::isfinite(norm)) return {};
  const int exponent = std::ilogb(norm);
  return {std::pow(std::ldexp(norm, -exponent), order.p), exponent};
}

double share_of(double norm, double total, NormOrder order) noexcept {
  if (!std::isfinite(total)) return std::numeric_limits<double>::quiet_NaN();
  if (!(norm > 0.0)) return 0.0;
  // A quotient of norms cannot overflow where their powers would.
  const double ratio = norm / total;
  if (order.infinite()) return ratio >= 1.0 ? 1.0 : 0.0;
  return std::pow(ratio, order.p);
}

double TensorStatistics::mean() const noexcept {
  if (elements == 0) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(signed_sum.sum / static_cast<double>(elements), signed_sum.exponent);
}

double TensorStatistics::norm(NormOrder order) const noexcept {
  if (nan != 0) return std::numeric_limits<double>::quiet_NaN();
  if (posinf + neginf != 0) return std::numeric_limits<double>::infinity();
  return order.infinite() ? max_abs : root(powers, order);
}

TensorStatistics with_nonfinite_zeroed(TensorStatistics tensor) noexcept {
  tensor.zeros += tensor.nonfinite();
  tensor.nan = tensor.posinf = tensor.neginf = 0;
  tensor.first_nonfinite = kNowhere;
  tensor.first_nonfinite_rank = -1;
  return tensor;
}

void append(TensorStatistics& tensor, const ChunkStatistics& chunk, std::uint32_t count, std::uint64_t position,
            NormOrder order) noexcept {
  TensorStatistics one;
  one.elements = count;
  one.zeros = chunk.zeros;
  one.subnormals = chunk.subnormals;
  one.nan = chunk.nan;
  one.posinf = chunk.posinf;
  one.neginf = chunk.neginf;
  one.max_abs = chunk.max_abs;
  one.min_abs = chunk.min_abs;
  one.powers = {chunk.power_sum, chunk.exponent};
  one.signed_sum = {chunk.signed_sum, chunk.exponent};
  if (chunk.first_nonfinite != kNoElement) one.first_nonfinite = position + chunk.first_nonfinite;
  add(tensor, one, order);
}

void add(TensorStatistics& tensor, const TensorStatistics& other, NormOrder order) noexcept {
  tensor.elements += other.elements;
  tensor.zeros += other.zeros;
  tensor.subnormals += other.subnormals;
  tensor.nan += other.nan;
  tensor.posinf += other.posinf;
  tensor.neginf += other.neginf;
  tensor.max_abs = std::max(tensor.max_abs, other.max_abs);
  tensor.min_abs = std::min(tensor.min_abs, other.min_abs);
  tensor.powers = add(tensor.powers, other.powers, order.p);
  tensor.signed_sum = add(tensor.signed_sum, other.signed_sum, 1.0);
  if (other.first_nonfinite < tensor.first_nonfinite) {
    tensor.first_nonfinite = other.first_nonfinite;
    tensor.first_nonfinite_rank = other.first_nonfinite_rank;
  }
}

}  // namespace gradclip
