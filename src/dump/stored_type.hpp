#pragma once
// Which element types of HDF5 stand for which gradient type.

#include <optional>
#include <string>

#include "gradclip/base/dtype.hpp"
#include "gradclip/dump/hdf5.hpp"

namespace gradclip {

/// IEEE little-endian floats for float64, float32 and float16; uint16 for bfloat16; uint8 with the attribute for
/// float8; floats with exactly the fields of bfloat16 or float8_e5m2; opaque bytes of the right size with the
/// attribute.
/// @param named  the attribute "dtype"
/// Errors: Error(bad_input) naming the type for anything else, and where the attribute contradicts the type.
[[nodiscard]] DType stored_dtype(const hdf5::ElementType& type, const std::optional<std::string>& named,
                                 const std::string& where);

}  // namespace gradclip
