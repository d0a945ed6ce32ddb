#pragma once
// How fine a type's numbers lie.

#include "gradclip/base/dtype.hpp"

namespace gradclip {

/// The distance from 1 to the next number of the type.
[[nodiscard]] double epsilon_of(DType dtype);

/// The smallest magnitude that is neither zero nor subnormal.
[[nodiscard]] double smallest_normal_of(DType dtype);

}  // namespace gradclip
