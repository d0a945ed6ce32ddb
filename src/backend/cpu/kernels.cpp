// What surrounds the inner loops: the sub-blocks of a chunk, the elements that the loops leave out, the choice of a
// variant.

#include "gradclip/backend/cpu/kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gradclip/backend/term.hpp"
#include "gradclip/base/dispatch.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <DType D>
BitsOf<D> load(const void* data, std::size_t i) {
  BitsOf<D> bits;
  std::memcpy(&bits, static_cast<const std::byte*>(data) + i * sizeof bits, sizeof bits);
  return bits;
}

// ---------------------------------------------------------------------------------------------------------------------
// Scaling
// ---------------------------------------------------------------------------------------------------------------------

template <DType D>
void scale_by_element(const void* from, void* to, std::size_t count, const ScaleFactors& factors) {
  for (std::size_t i = 0; i < count; ++i) {
    const BitsOf<D> bits = scale_element<D>(load<D>(from, i), factors);
    std::memcpy(static_cast<std::byte*>(to) + i * sizeof bits, &bits, sizeof bits);
  }
}

/// float8 has 256 elements: scaled and widened once, then looked up.
template <DType D>
void scale_by_table(const void* from, void* to, std::size_t count, const ScaleFactors& factors) {
  std::array<std::uint8_t, 256> table;
  for (std::size_t bits = 0; bits < table.size(); ++bits) {
    table[bits] = scale_element<D>(static_cast<std::uint8_t>(bits), factors);
  }
  const auto* source = static_cast<const std::uint8_t*>(from);
  std::transform(source, source + count, static_cast<std::uint8_t*>(to),
                 [&](std::uint8_t bits) { return table[bits]; });
}

/// @pre changes_bits(factors).
template <DType D>
void scale_run(const Kernels& kernels, const void* from, void* to, std::size_t count, const ScaleFactors& factors) {
  constexpr std::size_t kTableElements = 1024;
  if constexpr (is_float8(D)) {
    if (count >= kTableElements) return scale_by_table<D>(from, to, count, factors);
    return scale_by_element<D>(from, to, count, factors);
  } else {
    if (D != DType::float64 && factors.clip == ClipStep::in_float64)
      return scale_by_element<D>(from, to, count, factors);
    kernels.scale[static_cast<std::size_t>(D)](from, to, count, factors);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Statistics
// ---------------------------------------------------------------------------------------------------------------------

/// A chunk's elements after scaling, one sub-block at a time: in place if there is nothing to scale.
template <DType D>
class ScaledSubBlocks {
 public:
  ScaledSubBlocks(const Kernels& kernels, const Chunk& chunk, const ScaleFactors& factors)
      : kernels_(kernels), chunk_(chunk), factors_(without_divisions<D>(factors)), changes_(changes_bits(factors)) {}

  [[nodiscard]] std::size_t count(std::size_t sub_block) const {
    const std::size_t first = sub_block * kSubBlockElements;
    return first >= chunk_.count ? 0 : std::min<std::size_t>(kSubBlockElements, chunk_.count - first);
  }

  /// Whole rows: a short last one is filled up with zeros. Valid until the next call.
  [[nodiscard]] const std::byte* rows(std::size_t sub_block) {
    constexpr std::size_t kSize = sizeof(BitsOf<D>);
    const std::byte* data = chunk_.data + sub_block * kSubBlockElements * kSize;
    const std::size_t elements = count(sub_block);
    const std::size_t padding = (kLanes - elements % kLanes) % kLanes;
    if (!changes_ && padding == 0) return data;
    if (changes_) {
      scale_run<D>(kernels_, data, scratch_, elements, factors_);
    } else {
      std::memcpy(scratch_, data, elements * kSize);
    }
    std::memset(scratch_ + elements * kSize, 0, padding * kSize);
    return scratch_;
  }

 private:
  const Kernels& kernels_;
  const Chunk& chunk_;
  ScaleFactors factors_;
  bool changes_;
  alignas(64) std::byte scratch_[kSubBlockElements * sizeof(BitsOf<D>)];
};

/// The sums of a chunk's sub-blocks, and its counts so far.
struct Gathered {
  std::array<double, kSubBlocks> power{};
  std::array<double, kSubBlocks> sum{};
  ChunkStatistics counts;

  [[nodiscard]] ChunkStatistics result(int exponent) {
    counts.power_sum = fold(power.data(), kSubBlocks);
    counts.signed_sum = fold(sum.data(), kSubBlocks);
    counts.exponent = exponent;
    return counts;
  }
};

/// One sub-block element by element: the definition of what the inner loops do faster, for any element and any term.
template <DType D>
void gather_by_element(const std::byte* data, std::size_t count, std::size_t sub_block, float scale_inv,
                       const Term& term, Gathered& gathered) {
  std::array<double, kLanes> power{};
  std::array<double, kLanes> sum{};
  ChunkStatistics& counts = gathered.counts;
  for (std::size_t i = 0; i < count; ++i) {
    const BitsOf<D> bits = load<D>(data, i);
    const ComputeOf<D> value = element_value<D>(bits, scale_inv);
    const double x = static_cast<double>(value);
    if (!std::isfinite(x)) {
      ++(std::isnan(x) ? counts.nan : x > 0 ? counts.posinf : counts.neginf);
      const auto position = static_cast<std::uint32_t>(sub_block * kSubBlockElements + i);
      counts.first_nonfinite = std::min(counts.first_nonfinite, position);
      continue;
    }
    const double magnitude = std::abs(x);
    counts.zeros += magnitude == 0.0;
    counts.subnormals += magnitude != 0.0 && is_subnormal<D>(bits);
    counts.max_abs = std::max(counts.max_abs, magnitude);
    if (magnitude != 0.0) counts.min_abs = std::min(counts.min_abs, magnitude);
    const double scaled = x * term.scaling;
    power[i % kLanes] += term.of<D>(value, scaled);
    sum[i % kLanes] += scaled;
  }
  gathered.power[sub_block] = fold(power.data(), kLanes);
  gathered.sum[sub_block] = fold(sum.data(), kLanes);
}

template <DType D>
Gathered gather_by_element(ScaledSubBlocks<D>& elements, float scale_inv, const Term& term) {
  Gathered gathered;
  for (std::size_t s = 0; s < kSubBlocks && elements.count(s) > 0; ++s) {
    gather_by_element<D>(elements.rows(s), elements.count(s), s, scale_inv, term, gathered);
  }
  return gathered;
}

/// The inner loops' view of a sub-block: for float8 its values in float32; NaN and infinities, once found, replaced by
/// 0, which adds nothing to a sum.
template <DType D>
class VectorRows {
 public:
  static constexpr DType kType = is_float8(D) ? DType::float32 : D;
  using Bits = BitsOf<kType>;

  explicit VectorRows(float scale_inv) {
    if constexpr (is_float8(D)) {
      for (std::size_t bits = 0; bits < values_.size(); ++bits) {
        const auto element = static_cast<std::uint8_t>(bits);
        values_[bits] = Element<kType>::round(element_value<D>(element, scale_inv));
        const Bits magnitude = magnitude_bits<kType>(values_[bits]);
        subnormal_[bits] = is_subnormal<D>(element) && magnitude != 0 && is_finite<kType>(magnitude);
      }
    }
  }

  [[nodiscard]] const void* of(const std::byte* data, std::size_t elements) {
    if constexpr (!is_float8(D)) return data;
    for (std::size_t i = 0; i < elements; ++i) own_[i] = values_[std::to_integer<std::uint8_t>(data[i])];
    return own_.data();
  }

  /// Counts and places the non-finite among `elements` values.
  [[nodiscard]] const void* without_nonfinite(const void* values, std::size_t elements, std::size_t position,
                                              ChunkStatistics& counts) {
    using E = Element<kType>;
    for (std::size_t i = 0; i < elements; ++i) {
      const Bits bits = load<kType>(values, i);
      const Bits magnitude = magnitude_bits<kType>(bits);
      const bool nonfinite = magnitude >= E::kNonfinite;
      own_[i] = nonfinite ? Bits{0} : bits;
      if (nonfinite && counts.first_nonfinite == kNoElement) {
        counts.first_nonfinite = static_cast<std::uint32_t>(position + i);
      }
      counts.nan += magnitude >= E::kNan;
      counts.posinf += bits == E::kNonfinite;
      counts.neginf += bits == (E::kNonfinite | E::kSign);
    }
    return own_.data();
  }

  /// float8's own subnormals, which its float32 values do not show.
  [[nodiscard]] std::uint32_t float8_subnormals(const std::byte* data, std::size_t elements) const {
    std::uint32_t subnormals = 0;
    for (std::size_t i = 0; i < elements; ++i) subnormals += subnormal_[std::to_integer<std::uint8_t>(data[i])];
    return subnormals;
  }

 private:
  alignas(64) std::array<Bits, kSubBlockElements> own_;
  std::array<Bits, is_float8(D) ? 256 : 1> values_;
  std::array<std::uint8_t, is_float8(D) ? 256 : 1> subnormal_;
};

template <DType D>
Gathered gather_by_vectors(const Kernels& kernels, ScaledSubBlocks<D>& elements, float scale_inv, const Term& term) {
  constexpr DType kWide = VectorRows<D>::kType;
  constexpr std::size_t kType = static_cast<std::size_t>(kWide);
  const double smallest_normal = static_cast<double>(Element<kWide>::widen(Element<kWide>::kSmallestNormal));
  const std::size_t power = std::isinf(term.p) ? 0 : static_cast<std::size_t>(term.p);
  Gathered gathered;
  ChunkStatistics& counts = gathered.counts;
  VectorRows<D> vectors(scale_inv);
  for (std::size_t s = 0; s < kSubBlocks && elements.count(s) > 0; ++s) {
    const std::size_t count = elements.count(s);
    const std::size_t rows = (count + kLanes - 1) / kLanes;
    auto not_zeros =
        static_cast<std::uint32_t>(rows * kLanes - count);  // the padding, and what stands for NaN and infinities
    const std::byte* data = elements.rows(s);
    const void* values = vectors.of(data, rows * kLanes);
    SubBlock block = kernels.accumulate[kType][power](values, rows, term.scaling);
    if (!std::isfinite(block.signed_sum)) {
      const std::uint32_t before = counts.nan + counts.posinf + counts.neginf;
      values = vectors.without_nonfinite(values, rows * kLanes, s * kSubBlockElements, counts);
      not_zeros += counts.nan + counts.posinf + counts.neginf - before;
      block = kernels.accumulate[kType][power](values, rows, term.scaling);
    }
    if (block.min_abs < smallest_normal) {
      const SmallElements small = kernels.count_small[kType](values, rows);
      counts.zeros += small.zeros - not_zeros;
      if constexpr (!is_float8(D)) counts.subnormals += small.subnormals;
      block.min_abs = small.min_abs;
    }
    if constexpr (is_float8(D)) counts.subnormals += vectors.float8_subnormals(data, count);
    counts.max_abs = std::max(counts.max_abs, block.max_abs);
    counts.min_abs = std::min(counts.min_abs, block.min_abs);
    gathered.power[s] = block.power_sum;
    gathered.sum[s] = block.signed_sum;
  }
  return gathered;
}

/// float64 reads a chunk once where it can: sums of x and of x × 2^-k have the same bits up to the exponent, unless a
/// term of either is too large or too small for float64. So the sums are taken without k, and again only if the
/// magnitudes, known by then, leave the range of sums_need_no_scaling().
ChunkStatistics gather_float64(const Kernels& kernels, ScaledSubBlocks<DType::float64>& elements, Term term) {
  Gathered gathered = gather_by_vectors<DType::float64>(kernels, elements, 1.0F, term);
  const int exponent = exponent_of(gathered.counts.max_abs);
  if (sums_need_no_scaling(gathered.counts.max_abs, gathered.counts.min_abs, term.p)) {
    ChunkStatistics result = gathered.result(exponent);
    const int p = term.infinite() ? 1 : static_cast<int>(term.p);
    result.power_sum *= power_of_two(-p * exponent);
    result.signed_sum *= power_of_two(-exponent);
    return result;
  }
  term.scaling = power_of_two(-exponent);
  return gather_by_vectors<DType::float64>(kernels, elements, 1.0F, term).result(exponent);
}

template <DType D>
ChunkStatistics statistics_of(const Kernels& kernels, const Chunk& chunk, const ScaleFactors& factors,
                              const StatisticsRequest& request) {
  ScaledSubBlocks<D> elements(kernels, chunk, factors);
  Term term{request.terms, request.order.p, factors.normalizer, 1.0, factors.reference_in_float64};
  if (request.terms == TermArithmetic::reference) {
    return gather_by_element<D>(elements, factors.scale_inv, term).result(0);
  }
  if (request.order.by_products() || request.order.infinite()) {
    if constexpr (D == DType::float64) return gather_float64(kernels, elements, term);
    return gather_by_vectors<D>(kernels, elements, factors.scale_inv, term).result(0);
  }
  const Term extremes_only{TermArithmetic::exact, kInfinity, 1.0, 1.0, false};
  const int exponent =
      exponent_of(gather_by_vectors<D>(kernels, elements, factors.scale_inv, extremes_only).counts.max_abs);
  term.scaling = power_of_two(-exponent);
  return gather_by_element<D>(elements, factors.scale_inv, term).result(exponent);
}

// ---------------------------------------------------------------------------------------------------------------------
// Types
// ---------------------------------------------------------------------------------------------------------------------

}  // namespace

ChunkStatistics chunk_statistics(const Kernels& kernels, const Chunk& chunk, const ScaleFactors& factors,
                                 const StatisticsRequest& request) {
  return with_dtype(chunk.dtype, [&]<DType D>() { return statistics_of<D>(kernels, chunk, factors, request); });
}

void scale_chunk(const Kernels& kernels, const Chunk& chunk, const ScaleFactors& factors) {
  if (!changes_bits(factors)) return;
  with_dtype(chunk.dtype, [&]<DType D>() {
    scale_run<D>(kernels, chunk.data, chunk.data, chunk.count, without_divisions<D>(factors));
  });
}

void widen_chunk(const Kernels& kernels, const Chunk& chunk, const ScaleFactors& factors, double* out) {
  with_dtype(chunk.dtype, [&]<DType D>() {
    ScaledSubBlocks<D> elements(kernels, chunk, factors);
    for (std::size_t s = 0; s < kSubBlocks && elements.count(s) > 0; ++s) {
      const std::byte* data = elements.rows(s);
      const std::size_t count = elements.count(s);
      for (std::size_t i = 0; i < count; ++i) {
        *out++ = static_cast<double>(element_value<D>(load<D>(data, i), factors.scale_inv));
      }
    }
  });
}

void accumulate_chunk(const Chunk& into, const Chunk& from, const ScaleFactors& factors, bool add) {
  with_dtype(into.dtype, [&]<DType Into>() {
    with_dtype(from.dtype, [&]<DType From>() {
      for (std::size_t i = 0; i < from.count; ++i) {
        BitsOf<Into> bits = convert_element<Into, From>(load<From>(from.data, i), factors.scale_inv);
        if (add) bits = add_elements<Into>(load<Into>(into.data, i), bits);
        std::memcpy(into.data + i * sizeof bits, &bits, sizeof bits);
      }
    });
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Choice
// ---------------------------------------------------------------------------------------------------------------------

std::span<const Kernels* const> supported_kernels() {
  static const std::vector<const Kernels*> supported = [] {
    __builtin_cpu_init();
    std::vector<const Kernels*> found;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx2 && avx512) found.push_back(&kAvx512Kernels);
    if (avx2) found.push_back(&kAvx2Kernels);
    found.push_back(&kBaselineKernels);
    return found;
  }();
  return supported;
}

const Kernels& choose_kernels(std::string_view name) {
  const std::span<const Kernels* const> supported = supported_kernels();
  if (name.empty()) return *supported.front();
  std::string names;
  for (const Kernels* kernels : supported) {
    if (kernels->name == name) return *kernels;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", kernels->name);
  }
  const bool known = name == kAvx2Kernels.name || name == kAvx512Kernels.name;
  throw Error(ExitCode::usage,
              {.where = "environment variable GRADCLIP_CPU_KERNELS",
               .found = known ? fmt::format("{} needs instructions that this processor does not have", name)
                              : fmt::format("{} is no set of kernels", quoted(name)),
               .expected = fmt::format("one of {}", names),
               .advice = "unset it to take the best"});
}

}  // namespace gradclip::cpu
