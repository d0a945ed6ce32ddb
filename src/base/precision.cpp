#include "gradclip/base/precision.hpp"

#include "gradclip/base/dispatch.hpp"
#include "gradclip/base/element.hpp"

namespace gradclip {

double epsilon_of(DType dtype) {
  return with_dtype(dtype, []<DType D>() -> double {
    const auto next = static_cast<BitsOf<D>>(Element<D>::round(ComputeOf<D>{1}) + 1u);
    return static_cast<double>(Element<D>::widen(next)) - 1.0;
  });
}

double smallest_normal_of(DType dtype) {
  return with_dtype(dtype, []<DType D>() -> double { return Element<D>::widen(Element<D>::kSmallestNormal); });
}

}  // namespace gradclip
