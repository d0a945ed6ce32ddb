// What surrounds the inner loops: the sub-blocks of a chunk, the elements that the loops leave out, the choice of a
// variant.

#include "gradclip/backend/cpu/kernels.hpp"

#include <cpuid.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/backend/term.hpp"
#include "gradclip/base/dispatch.hpp"
#include "gradclip/base/divisions.hpp"
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

/// float8 has 256 elements: scaled once, then looked up. A thread keeps the last table, since a run has few factors.
template <DType D>
const std::array<std::uint8_t, 256>& scaled_elements(const ScaleFactors& factors) {
  thread_local std::optional<ScaleFactors> known;
  thread_local std::array<std::uint8_t, 256> table;
  if (known != factors) {
    for (std::size_t bits = 0; bits < table.size(); ++bits) {
      table[bits] = scale_element<D>(static_cast<std::uint8_t>(bits), factors);
    }
    known = factors;
  }
  return table;
}

/// @pre changes_bits(factors).
template <DType D>
void scale_run(const Kernels& kernels, const void* from, void* to, std::size_t count, const ScaleFactors& factors) {
  if constexpr (is_float8(D)) {
    const std::uint8_t* table = scaled_elements<D>(factors).data();
    kernels.look_up(static_cast<const std::uint8_t*>(from), static_cast<std::uint8_t*>(to), count, table);
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
      : kernels_(kernels), chunk_(chunk), factors_(without_divisions(D, factors)), changes_(changes_bits(factors)) {}

  [[nodiscard]] std::size_t count(std::size_t sub_block) const {
    const std::size_t first = sub_block * kSubBlockElements;
    return first >= chunk_.count ? 0 : std::min<std::size_t>(kSubBlockElements, chunk_.count - first);
  }

  /// Whole rows: a short last one is filled up with zeros. Valid until the next call.
  [[nodiscard]] const std::byte* rows(std::size_t sub_block) { return rows(sub_block, changes_); }

  /// The same before scaling.
  [[nodiscard]] const std::byte* stored_rows(std::size_t sub_block) { return rows(sub_block, false); }

  [[nodiscard]] bool changes() const noexcept { return changes_; }
  [[nodiscard]] const ScaleFactors& factors() const noexcept { return factors_; }  ///< with fewer divisions

 private:
  const std::byte* rows(std::size_t sub_block, bool scaled) {
    constexpr std::size_t kSize = sizeof(BitsOf<D>);
    const std::byte* data = chunk_.data + sub_block * kSubBlockElements * kSize;
    const std::size_t elements = count(sub_block);
    const std::size_t padding = (kLanes - elements % kLanes) % kLanes;
    if (!scaled && padding == 0) return data;
    if (scaled && in_scratch_ == sub_block) return scratch_;
    in_scratch_ = scaled ? sub_block : kSubBlocks;
    if (scaled) {
      scale_run<D>(kernels_, data, scratch_, elements, factors_);
    } else {
      std::memcpy(scratch_, data, elements * kSize);
    }
    std::memset(scratch_ + elements * kSize, 0, padding * kSize);
    return scratch_;
  }

  const Kernels& kernels_;
  const Chunk& chunk_;
  ScaleFactors factors_;
  bool changes_;
  std::size_t in_scratch_ = kSubBlocks;  ///< the sub-block that is there scaled; kSubBlocks: none
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

/// The sums of sub-blocks by the inner loops, which scale on the way where they can, so that nothing is stored in
/// between.
template <DType D>
class SubBlockSums {
 public:
  SubBlockSums(const Kernels& kernels, ScaledSubBlocks<D>& elements, float scale_inv, const Term& term)
      : kernels_(kernels),
        elements_(elements),
        power_(std::isinf(term.p) ? 0 : static_cast<std::size_t>(term.p)),
        scaling_(is_float8(D) ? static_cast<double>(scale_inv) : term.scaling),
        scales_on_the_way_(!is_float8(D) && elements.changes() &&
                           (D == DType::float64 || elements.factors().clip != ClipStep::in_float64)) {}

  [[nodiscard]] SubBlock of(std::size_t sub_block) {
    const std::size_t rows = (elements_.count(sub_block) + kLanes - 1) / kLanes;
    if constexpr (!is_float8(D)) {
      if (scales_on_the_way_) {
        return kernels_.accumulate_scaled[kType][power_](elements_.stored_rows(sub_block), rows, elements_.factors(),
                                                         scaling_);
      }
    }
    return of(elements_.rows(sub_block), rows);
  }

  /// Of rows that are scaled already.
  [[nodiscard]] SubBlock of(const void* rows, std::size_t count) const {
    return kernels_.accumulate[kType][power_](rows, count, scaling_);
  }

 private:
  static constexpr auto kType = static_cast<std::size_t>(D);

  const Kernels& kernels_;
  ScaledSubBlocks<D>& elements_;
  std::size_t power_;
  double scaling_;
  bool scales_on_the_way_;
};

/// Counts and places the non-finite among scaled elements.
/// @param out  the elements with 0, which adds nothing to a sum, in their place
template <DType D>
void take_out_nonfinite(const std::byte* data, std::size_t elements, std::size_t position, BitsOf<D>* out,
                        ChunkStatistics& counts) {
  using E = Element<D>;
  for (std::size_t i = 0; i < elements; ++i) {
    const BitsOf<D> bits = load<D>(data, i);
    const BitsOf<D> magnitude = magnitude_bits<D>(bits);
    const bool nonfinite = magnitude >= E::kNonfinite;
    out[i] = nonfinite ? BitsOf<D>{0} : bits;
    if (nonfinite && counts.first_nonfinite == kNoElement) {
      counts.first_nonfinite = static_cast<std::uint32_t>(position + i);
    }
    counts.nan += magnitude >= E::kNan;
    counts.posinf += magnitude < E::kNan && bits == E::kNonfinite;
    counts.neginf += magnitude < E::kNan && bits == (E::kNonfinite | E::kSign);
  }
}

/// @pre keeps_order<D>(scale_inv)
template <DType D>
Gathered gather_by_vectors(const Kernels& kernels, ScaledSubBlocks<D>& elements, float scale_inv, const Term& term) {
  using E = Element<D>;
  const double smallest_normal = static_cast<double>(element_value<D>(E::kSmallestNormal, scale_inv));
  SubBlockSums<D> sums(kernels, elements, scale_inv, term);
  Gathered gathered;
  ChunkStatistics& counts = gathered.counts;
  alignas(64) BitsOf<D> finite[kSubBlockElements];
  for (std::size_t s = 0; s < kSubBlocks && elements.count(s) > 0; ++s) {
    SubBlock block = sums.of(s);
    const bool all_finite = std::isfinite(block.signed_sum);
    if (!all_finite || block.min_abs < smallest_normal) {
      const std::size_t rows = (elements.count(s) + kLanes - 1) / kLanes;
      const std::byte* data = elements.rows(s);
      // Zeros that are none: the padding, and what stands for NaN and infinities.
      auto not_zeros = static_cast<std::uint32_t>(rows * kLanes - elements.count(s));
      const void* values = data;
      if (!all_finite) {
        const std::uint32_t before = counts.nan + counts.posinf + counts.neginf;
        take_out_nonfinite<D>(data, rows * kLanes, s * kSubBlockElements, finite, counts);
        not_zeros += counts.nan + counts.posinf + counts.neginf - before;
        values = finite;
        block = sums.of(values, rows);
      }
      const SmallElements small = kernels.count_small[static_cast<std::size_t>(D)](values, rows);
      counts.zeros += small.zeros - not_zeros;
      counts.subnormals += small.subnormals;
      block.min_abs = is_float8(D) ? static_cast<double>(static_cast<float>(small.min_abs) * scale_inv) : small.min_abs;
    }
    counts.max_abs = std::max(counts.max_abs, block.max_abs);
    counts.min_abs = std::min(counts.min_abs, block.min_abs);
    gathered.power[s] = block.power_sum;
    gathered.sum[s] = block.signed_sum;
  }
  return gathered;
}

template <DType D>
Gathered gather(const Kernels& kernels, ScaledSubBlocks<D>& elements, float scale_inv, const Term& term) {
  return keeps_order<D>(scale_inv) ? gather_by_vectors<D>(kernels, elements, scale_inv, term)
                                   : gather_by_element<D>(elements, scale_inv, term);
}

/// float64 reads a chunk once where it can: sums of x and of x × 2^-k have the same bits up to the exponent, unless a
/// term of either is too large or too small for float64. So the sums are taken without k, and again only if the
/// magnitudes, known by then, leave the range of sums_need_no_scaling().
ChunkStatistics gather_float64(const Kernels& kernels, ScaledSubBlocks<DType::float64>& elements, Term term) {
  Gathered gathered = gather_by_vectors<DType::float64>(kernels, elements, 1.0F, term);
  const int exponent = exponent_of(gathered.counts.max_abs);
  if (sums_need_no_scaling(gathered.counts.max_abs, gathered.counts.min_abs, term.p)) {
    ChunkStatistics result = gathered.result(exponent);
    scale_sums(result, term, exponent);
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
    return gather<D>(kernels, elements, factors.scale_inv, term).result(0);
  }
  const Term extremes_only{TermArithmetic::exact, kInfinity, 1.0, 1.0, false};
  const int exponent = exponent_of(gather<D>(kernels, elements, factors.scale_inv, extremes_only).counts.max_abs);
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
    scale_run<D>(kernels, chunk.data, chunk.data, chunk.count, without_divisions(D, factors));
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

namespace {

/// Clang 16's __builtin_cpu_supports() does not know it.
bool supports_f16c() {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace

std::span<const Kernels* const> supported_kernels() {
  static const std::vector<const Kernels*> supported = [] {
    __builtin_cpu_init();
    std::vector<const Kernels*> found;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && supports_f16c();
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
