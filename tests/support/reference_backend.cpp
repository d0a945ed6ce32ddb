#include "reference_backend.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace gradclip::reference {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A type's fields, and its first magnitude that is not finite.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  std::uint64_t nonfinite;
  std::uint64_t nan;
  bool has_infinity;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return {11, 52, 0x7FF0000000000000, 0x7FF8000000000000, true};
    case DType::float32:
      return {8, 23, 0x7F800000, 0x7FC00000, true};
    case DType::float16:
      return {5, 10, 0x7C00, 0x7E00, true};
    case DType::bfloat16:
      return {8, 7, 0x7F80, 0x7FC0, true};
    case DType::float8_e4m3fn:
      return {4, 3, 0x7F, 0x7F, false};
    case DType::float8_e5m2:
      return {5, 2, 0x7C, 0x7F, true};
  }
  return {};
}

bool is_narrow(DType dtype) {
  return dtype != DType::float64 && dtype != DType::float32;
}
bool is_float8_type(DType dtype) {
  return size_of(dtype) == 1;
}

/// The number that a magnitude's fields say, also where the type has infinities or NaN instead.
double number_of_fields(const Format& format, std::uint64_t magnitude) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const auto exponent = static_cast<int>(magnitude >> format.mantissa_bits);
  const std::uint64_t mantissa = magnitude & ((std::uint64_t{1} << format.mantissa_bits) - 1);
  if (exponent == 0) return std::ldexp(static_cast<double>(mantissa), 1 - bias - format.mantissa_bits);
  const std::uint64_t significand = mantissa | std::uint64_t{1} << format.mantissa_bits;
  return std::ldexp(static_cast<double>(significand), exponent - bias - format.mantissa_bits);
}

/// All numbers >= 0 of a narrow type in ascending order, and the one that would follow the largest.
const std::vector<double>& numbers_of(DType dtype) {
  static const std::vector<std::vector<double>> all = [] {
    std::vector<std::vector<double>> tables(kDTypeCount);
    for (int i = 0; i < kDTypeCount; ++i) {
      const auto type = static_cast<DType>(i);
      if (!is_narrow(type)) continue;
      const Format format = format_of(type);
      for (std::uint64_t m = 0; m <= format.nonfinite; ++m) {
        tables[static_cast<std::size_t>(i)].push_back(number_of_fields(format, m));
      }
    }
    return tables;
  }();
  return all[static_cast<std::size_t>(dtype)];
}

std::uint64_t sign_bit(DType dtype) {
  return std::uint64_t{1} << (8 * size_of(dtype) - 1);
}

/// a op b in the precision of the type's arithmetic, as a number of the type.
template <typename Operation>
std::uint64_t operate(DType dtype, std::uint64_t bits, double number, Operation operation) {
  const double x = decode(dtype, bits);
  if (dtype == DType::float64) return encode(dtype, operation(x, number));
  const float result = operation(static_cast<float>(x), static_cast<float>(number));
  return encode(dtype, static_cast<double>(result));
}

double value_of(DType dtype, std::uint64_t bits, float scale_inv) {
  const double x = decode(dtype, bits);
  return is_float8_type(dtype) ? static_cast<double>(static_cast<float>(x) * scale_inv) : x;
}

double rounded(DType dtype, double x) {
  return decode(dtype, encode(dtype, x));
}

double exact_term(double scaled, double p) {
  const double a = std::fabs(scaled);
  if (std::isinf(p)) return 0.0;
  if (p == 1.0) return a;
  if (p == 2.0) return a * a;
  if (p == 3.0) return a * a * a;
  if (p == 4.0) return (a * a) * (a * a);
  return std::pow(a, p);
}

double reference_term_of(DType dtype, double x, double normalizer, double p) {
  const auto product = [&](double a, double b) {
    return rounded(
        dtype, dtype == DType::float64 ? a * b : static_cast<double>(static_cast<float>(a) * static_cast<float>(b)));
  };
  const double a = std::fabs(x);
  const double q = rounded(dtype, dtype == DType::float64
                                      ? a / normalizer
                                      : static_cast<double>(static_cast<float>(a) / static_cast<float>(normalizer)));
  if (std::isinf(p)) return 0.0;
  if (p == 2.0) return product(q, q);
  if (p == 3.0 && dtype != DType::float16) return product(product(q, q), q);
  if (dtype == DType::float64) return std::pow(q, p);
  return rounded(dtype, static_cast<double>(std::pow(static_cast<float>(q), static_cast<float>(p))));
}

double fold_by_halves(std::vector<double> a) {
  for (std::size_t half = a.size() / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) a[j] = a[j] + a[j + half];
  }
  return a[0];
}

ChunkStatistics statistics_of(const Chunk& chunk, const ScaleFactors& factors, const StatisticsRequest& request) {
  ChunkStatistics result;
  std::vector<double> values(chunk.count);
  for (std::size_t i = 0; i < chunk.count; ++i) {
    const std::uint64_t bits = scale(chunk.dtype, load(chunk.dtype, chunk.data, i), factors);
    const double x = values[i] = value_of(chunk.dtype, bits, factors.scale_inv);
    if (std::isnan(x)) ++result.nan;
    if (x == kInfinity) ++result.posinf;
    if (x == -kInfinity) ++result.neginf;
    if (!std::isfinite(x)) {
      if (result.first_nonfinite == kNoElement) result.first_nonfinite = static_cast<std::uint32_t>(i);
      continue;
    }
    if (x == 0.0) {
      ++result.zeros;
      continue;
    }
    if (is_subnormal(chunk.dtype, bits)) ++result.subnormals;
    result.max_abs = std::max(result.max_abs, std::fabs(x));
    result.min_abs = std::min(result.min_abs, std::fabs(x));
  }

  const double p = request.order.p;
  const bool products = p == 1 || p == 2 || p == 3 || p == 4 || std::isinf(p);
  const bool reference_terms = request.terms == TermArithmetic::reference;
  if (!reference_terms && (chunk.dtype == DType::float64 || !products)) {
    std::frexp(result.max_abs, &result.exponent);
    result.exponent = std::max(result.exponent, -1021);
  }

  std::vector<std::vector<double>> power(16, std::vector<double>(64, 0.0));
  std::vector<std::vector<double>> sum(16, std::vector<double>(64, 0.0));
  for (std::size_t i = 0; i < chunk.count; ++i) {
    if (!std::isfinite(values[i])) continue;
    const double scaled = std::ldexp(values[i], -result.exponent);
    const double term = reference_terms ? reference_term_of(factors.reference_in_float64 ? DType::float64 : chunk.dtype,
                                                            values[i], factors.normalizer, p)
                                        : exact_term(scaled, p);
    double& power_lane = power[i / 4096][i % 64];
    double& sum_lane = sum[i / 4096][i % 64];
    power_lane = power_lane + term;
    sum_lane = sum_lane + scaled;
  }
  std::vector<double> powers;
  std::vector<double> sums;
  for (const auto& lanes : power) powers.push_back(fold_by_halves(lanes));
  for (const auto& lanes : sum) sums.push_back(fold_by_halves(lanes));
  result.power_sum = fold_by_halves(powers);
  result.signed_sum = fold_by_halves(sums);
  return result;
}

}  // namespace

double decode(DType dtype, std::uint64_t bits) {
  const Format format = format_of(dtype);
  const std::uint64_t magnitude = bits & (sign_bit(dtype) - 1);
  const double sign = (bits & sign_bit(dtype)) != 0 ? -1.0 : 1.0;
  if (magnitude < format.nonfinite) return sign * number_of_fields(format, magnitude);
  return format.has_infinity && magnitude == format.nonfinite ? sign * kInfinity : kNan;
}

std::uint64_t encode(DType dtype, double x) {
  const Format format = format_of(dtype);
  if (std::isnan(x)) return format.nan;
  if (dtype == DType::float64) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  if (dtype == DType::float32) {
    const auto narrow = static_cast<float>(x);
    std::uint32_t bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    return bits;
  }
  const std::vector<double>& numbers = numbers_of(dtype);
  const double a = std::fabs(x);
  const auto above = std::lower_bound(numbers.begin(), numbers.end(), a);
  auto nearest = static_cast<std::uint64_t>(above - numbers.begin());
  if (above == numbers.end()) {
    nearest = format.nonfinite;
  } else if (*above != a) {
    // Differences of a float and two neighbours among at most 11-bit numbers around it are exact in long double.
    const long double up = static_cast<long double>(*above) - a;
    const long double down = static_cast<long double>(a) - *(above - 1);
    if (down < up || (down == up && nearest % 2 == 1)) --nearest;
  }
  if (nearest == format.nonfinite && !format.has_infinity) return format.nan;
  return nearest | (std::signbit(x) ? sign_bit(dtype) : 0);
}

bool is_subnormal(DType dtype, std::uint64_t bits) {
  const std::uint64_t magnitude = bits & (sign_bit(dtype) - 1);
  return magnitude != 0 && magnitude >> format_of(dtype).mantissa_bits == 0;
}

std::uint64_t scale(DType dtype, std::uint64_t bits, const ScaleFactors& factors) {
  for (int i = 0; i < 2; ++i) {
    const double number = factors.numbers[i];
    if (factors.steps[i] == ScaleStep::divide)
      bits = operate(dtype, bits, number, [](auto a, auto b) { return a / b; });
    if (factors.steps[i] == ScaleStep::multiply)
      bits = operate(dtype, bits, number, [](auto a, auto b) { return a * b; });
  }
  if (factors.zero_nonfinite && !std::isfinite(decode(dtype, bits))) bits = 0;
  if (factors.clip == ClipStep::in_gradient_precision) {
    bits = operate(dtype, bits, factors.coefficient, [](auto a, auto b) { return a * b; });
  }
  if (factors.clip == ClipStep::in_float64) {
    const double product = decode(dtype, bits) * factors.coefficient;
    bits = encode(dtype, dtype == DType::float64 ? product : static_cast<double>(static_cast<float>(product)));
  }
  return bits;
}

std::uint64_t load(DType dtype, const std::byte* data, std::size_t i) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, data + i * size_of(dtype), size_of(dtype));  // little-endian, as the dump format is
  return bits;
}

void store(DType dtype, std::byte* data, std::size_t i, std::uint64_t bits) {
  std::memcpy(data + i * size_of(dtype), &bits, size_of(dtype));
}

BackendDescription ReferenceBackend::describe() const {
  return {"reference", "by hand", MemorySpace::host, {}};
}

Buffer ReferenceBackend::allocate(std::size_t bytes, MemorySpace space) {
  return Buffer({new std::byte[bytes], bytes, space}, [](Bytes owned) { delete[] owned.data; });
}

void ReferenceBackend::move(Bytes from, Bytes to) {
  std::copy_n(from.data, from.size, to.data);
}

void ReferenceBackend::statistics(const ChunkTable& table, const StatisticsRequest& request, Bytes out) {
  for (std::size_t i = 0; i < table.chunks.size(); ++i) {
    const ChunkStatistics result = statistics_of(table.chunks[i], table.factors[table.chunks[i].factors], request);
    std::memcpy(out.data + i * sizeof result, &result, sizeof result);
  }
}

void ReferenceBackend::scale(const ChunkTable& table) {
  for (const Chunk& chunk : table.chunks) {
    for (std::size_t i = 0; i < chunk.count; ++i) {
      const std::uint64_t bits = load(chunk.dtype, chunk.data, i);
      store(chunk.dtype, chunk.data, i, reference::scale(chunk.dtype, bits, table.factors[chunk.factors]));
    }
  }
}

void ReferenceBackend::combine(std::span<const ChunkTable> addends, PartialOperation operation, double divisor,
                               Bytes out) {
  std::byte* at = out.data;
  for (std::size_t c = 0; c < addends[0].chunks.size(); ++c) {
    for (std::size_t i = 0; i < addends[0].chunks[c].count; ++i) {
      double combined = 0.0;
      for (std::size_t rank = 0; rank < addends.size(); ++rank) {
        const Chunk& chunk = addends[rank].chunks[c];
        const ScaleFactors& factors = addends[rank].factors[chunk.factors];
        const std::uint64_t bits = reference::scale(chunk.dtype, load(chunk.dtype, chunk.data, i), factors);
        const double x = value_of(chunk.dtype, bits, factors.scale_inv);
        if (rank == 0) {
          combined = x;
        } else if (std::isnan(x) || std::isnan(combined)) {
          combined = kNan;
        } else if (operation == PartialOperation::max) {
          if (x > combined) combined = x;
        } else if (operation == PartialOperation::min) {
          if (x < combined) combined = x;
        } else if (operation == PartialOperation::product) {
          combined = combined * x;
        } else {
          combined = combined + x;
        }
      }
      if (operation == PartialOperation::avg) combined = combined / divisor;
      store(DType::float64, at, 0, encode(DType::float64, combined));
      at += sizeof(double);
    }
  }
}

void ReferenceBackend::accumulate(std::span<const Chunk> into, const ChunkTable& from, AccumulateStep step) {
  const auto through_float = [](DType dtype, double x) {
    return dtype == DType::float64 ? x : static_cast<double>(static_cast<float>(x));
  };
  for (std::size_t c = 0; c < into.size(); ++c) {
    const DType to = into[c].dtype;
    const Chunk& source = from.chunks[c];
    for (std::size_t i = 0; i < source.count; ++i) {
      std::uint64_t bits = load(source.dtype, source.data, i);
      if (to != source.dtype || is_float8_type(to)) {
        const double value = value_of(source.dtype, bits, from.factors[source.factors].scale_inv);
        bits = encode(to, through_float(to, value));
      }
      if (step == AccumulateStep::add) {
        const double sum = decode(to, load(to, into[c].data, i)) + decode(to, bits);
        bits = encode(to, through_float(to, sum));
      }
      store(to, into[c].data, i, bits);
    }
  }
}

}  // namespace gradclip::reference
