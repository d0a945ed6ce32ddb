#include "gradclip/dump/stored_type.hpp"

#include <array>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using hdf5::ElementType;

struct FloatFields {
  DType dtype;
  std::size_t size, sign, exponent, exponent_size, mantissa_size, bias;
};

constexpr std::array<FloatFields, 5> kFloats{{{DType::float64, 8, 63, 52, 11, 52, 1023},
                                              {DType::float32, 4, 31, 23, 8, 23, 127},
                                              {DType::float16, 2, 15, 10, 5, 10, 15},
                                              {DType::bfloat16, 2, 15, 7, 8, 7, 127},
                                              {DType::float8_e5m2, 1, 7, 2, 5, 2, 15}}};

bool all_bits_in_order(const ElementType& type) {
  return type.precision == 8 * type.size && type.bit_offset == 0 && (type.size == 1 || type.little_endian);
}

std::optional<DType> float_dtype(const ElementType& type) {
  if (!all_bits_in_order(type) || !type.implied_one || type.mantissa_position != 0) return std::nullopt;
  for (const FloatFields& fields : kFloats) {
    if (type.size == fields.size && type.sign_position == fields.sign && type.exponent_position == fields.exponent &&
        type.exponent_size == fields.exponent_size && type.mantissa_size == fields.mantissa_size &&
        type.exponent_bias == fields.bias) {
      return fields.dtype;
    }
  }
  return std::nullopt;
}

bool names_size(const std::optional<DType>& named, std::size_t size) {
  return named && size_of(*named) == size;
}

std::optional<DType> raw_bits_dtype(const ElementType& type, const std::optional<DType>& named) {
  if (!all_bits_in_order(type) || type.is_signed) return std::nullopt;
  if (type.size == 2) return DType::bfloat16;
  return type.size == 1 && names_size(named, 1) ? named : std::nullopt;
}

std::optional<DType> dtype_of(const ElementType& type, const std::optional<DType>& named) {
  switch (type.type_class) {
    case ElementType::Class::floating:
      return float_dtype(type);
    case ElementType::Class::integer:
      return raw_bits_dtype(type, named);
    case ElementType::Class::opaque:
      return names_size(named, type.size) ? named : std::nullopt;
    default:
      return std::nullopt;
  }
}

}  // namespace

DType stored_dtype(const ElementType& type, const std::optional<std::string>& named, const std::string& where) {
  std::optional<DType> named_dtype;
  if (named) named_dtype = parse_dtype(*named);
  if (named && !named_dtype) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = "the attribute 'dtype' is " + quoted(named->substr(0, 100)),
                                      .expected = "one of " + std::string(dtype_names()),
                                      .advice = {},
                                      .kind = "dtype"});
  }
  const auto dtype = dtype_of(type, named_dtype);
  const std::string tag = named ? " with the attribute dtype " + quoted(*named) : " without the attribute dtype";
  if (!dtype || named_dtype.value_or(*dtype) != *dtype) {
    throw Error(
        ExitCode::bad_input,
        {.where = where,
         .found = "is stored as " + describe(type) + tag,
         .expected =
             "little-endian float64, float32 or float16; uint16 for bfloat16, uint8 for float8; floats with the "
             "fields of bfloat16 or float8_e5m2; or opaque bytes, and an attribute dtype that says the same",
         .advice = {},
         .kind = "dtype"});
  }
  return *dtype;
}

}  // namespace gradclip
