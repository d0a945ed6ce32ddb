#pragma once
// From a type known at run time to a constant.

#include "gradclip/base/dtype.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip {

/// Calls `function.template operator()<D>()` with the dtype as a constant, and returns what it returns.
template <typename Function>
auto with_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::float64:
      return function.template operator()<DType::float64>();
    case DType::float32:
      return function.template operator()<DType::float32>();
    case DType::float16:
      return function.template operator()<DType::float16>();
    case DType::bfloat16:
      return function.template operator()<DType::bfloat16>();
    case DType::float8_e4m3fn:
      return function.template operator()<DType::float8_e4m3fn>();
    case DType::float8_e5m2:
      return function.template operator()<DType::float8_e5m2>();
  }
  throw Error(ExitCode::bug, {.where = "with_dtype", .found = "no such dtype"});
}

}  // namespace gradclip
