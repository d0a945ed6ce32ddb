#include "gradclip/base/divisions.hpp"

#include <array>
#include <cstddef>
#include <cstdint>

#include "gradclip/base/dispatch.hpp"

namespace gradclip {
namespace {

/// A power of two whose reciprocal is normal in the type's arithmetic.
bool is_simple(DType dtype, double divisor) {
  constexpr std::uint64_t kMantissa = 0x000FFFFFFFFFFFFFu;
  const int largest_exponent = dtype == DType::float64 ? 1022 : 126;
  const auto bits = bits_as<std::uint64_t>(divisor);
  const int exponent = static_cast<int>(bits >> 52 & 0x7FFu) - 1023;
  return (bits & kMantissa) == 0 && exponent >= -largest_exponent && exponent <= largest_exponent;
}

/// Signs play no part: rounding to nearest is symmetric, and a NaN is canonical on either way.
template <DType D>
bool same_for_every_element(double divisor, double reciprocal) {
  for (std::uint32_t bits = 0; bits <= Element<D>::kNan; ++bits) {
    const auto element = static_cast<BitsOf<D>>(bits);
    if (scale_step<D>(element, ScaleStep::divide, divisor) != scale_step<D>(element, ScaleStep::multiply, reciprocal)) {
      return false;
    }
  }
  return true;
}

bool same_for_every_element(DType dtype, double divisor, double reciprocal) {
  return dtype == DType::float16 ? same_for_every_element<DType::float16>(divisor, reciprocal)
                                 : same_for_every_element<DType::bfloat16>(divisor, reciprocal);
}

/// The last answers of this thread: a run has one divisor or two, and asks for each chunk.
class Answers {
 public:
  bool operator()(DType dtype, double divisor, double reciprocal) {
    for (const Answer& answer : answers_) {
      if (answer.dtype == dtype && answer.divisor == divisor) return answer.same;
    }
    Answer& answer = answers_[next_++ % answers_.size()];
    answer = {dtype, divisor, same_for_every_element(dtype, divisor, reciprocal)};
    return answer.same;
  }

 private:
  struct Answer {
    DType dtype = DType::float64;
    double divisor = 0.0;
    bool same = false;
  };
  std::array<Answer, 8> answers_;
  std::size_t next_ = 0;
};

}  // namespace

ScaleFactors without_divisions(DType dtype, const ScaleFactors& factors) {
  thread_local Answers known;
  ScaleFactors result = factors;
  for (std::size_t i = 0; i < 2; ++i) {
    if (factors.steps[i] != ScaleStep::divide) continue;
    const double divisor = factors.numbers[i];
    double reciprocal = 1.0 / divisor;
    if (!is_simple(dtype, divisor)) {
      if (size_of(dtype) != 2) continue;
      reciprocal = static_cast<double>(1.0F / static_cast<float>(divisor));
      if (!known(dtype, divisor, reciprocal)) continue;
    }
    result.steps[i] = ScaleStep::multiply;
    result.numbers[i] = reciprocal;
  }
  return result;
}

}  // namespace gradclip
