// The inner loops for AVX-512: all 64 lanes of a sub-block in registers.

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <limits>

#include "gradclip/backend/cpu/kernels.hpp"

#define GRADCLIP_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define GRADCLIP_INLINE GRADCLIP_TARGET __attribute__((always_inline)) inline

namespace gradclip::cpu {
namespace {

using Floats = __m512;
using Doubles = __m512d;
using Words = __m512i;

constexpr std::size_t kDoubleLanes = 8;
constexpr std::size_t kWordLanes = 32;
constexpr std::size_t kColumns = kLanes;
template <typename T>
constexpr std::size_t kVectorLanes = 64 / sizeof(T);

GRADCLIP_INLINE Floats load(const float* at) {
  return _mm512_loadu_ps(at);
}
GRADCLIP_INLINE Doubles load(const double* at) {
  return _mm512_loadu_pd(at);
}
GRADCLIP_INLINE Doubles widen(const float* at) {
  return _mm512_cvtps_pd(_mm256_loadu_ps(at));
}
GRADCLIP_INLINE void store(float* at, Floats x) {
  _mm512_storeu_ps(at, x);
}
GRADCLIP_INLINE void store(double* at, Doubles x) {
  _mm512_storeu_pd(at, x);
}
GRADCLIP_INLINE Floats broadcast(float x) {
  return _mm512_set1_ps(x);
}
GRADCLIP_INLINE Doubles broadcast(double x) {
  return _mm512_set1_pd(x);
}

GRADCLIP_INLINE Doubles add(Doubles a, Doubles b) {
  return _mm512_add_pd(a, b);
}
GRADCLIP_INLINE Doubles add_exact_product(Doubles a, Doubles x, Doubles y) {
  return _mm512_fmadd_pd(x, y, a);
}
GRADCLIP_INLINE Floats mul(Floats a, Floats b) {
  return _mm512_mul_ps(a, b);
}
GRADCLIP_INLINE Doubles mul(Doubles a, Doubles b) {
  return _mm512_mul_pd(a, b);
}
GRADCLIP_INLINE Floats div(Floats a, Floats b) {
  return _mm512_div_ps(a, b);
}
GRADCLIP_INLINE Doubles div(Doubles a, Doubles b) {
  return _mm512_div_pd(a, b);
}
GRADCLIP_INLINE Floats abs(Floats x) {
  return _mm512_abs_ps(x);
}
GRADCLIP_INLINE Doubles abs(Doubles x) {
  return _mm512_abs_pd(x);
}

// vrange with these immediates: the larger, the smaller of two magnitudes, without its sign.
GRADCLIP_INLINE Floats max_abs(Floats a, Floats b) {
  return _mm512_range_ps(a, b, 0b1011);
}
GRADCLIP_INLINE Floats min_abs(Floats a, Floats b) {
  return _mm512_range_ps(a, b, 0b1010);
}
GRADCLIP_INLINE Doubles max_abs(Doubles a, Doubles b) {
  return _mm512_range_pd(a, b, 0b1011);
}
GRADCLIP_INLINE Doubles min_abs(Doubles a, Doubles b) {
  return _mm512_range_pd(a, b, 0b1010);
}
GRADCLIP_INLINE float reduce_max(Floats x) {
  return _mm512_reduce_max_ps(x);
}
GRADCLIP_INLINE float reduce_min(Floats x) {
  return _mm512_reduce_min_ps(x);
}
GRADCLIP_INLINE double reduce_max(Doubles x) {
  return _mm512_reduce_max_pd(x);
}
GRADCLIP_INLINE double reduce_min(Doubles x) {
  return _mm512_reduce_min_pd(x);
}

GRADCLIP_INLINE double fold_vector(Doubles x) {
  const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(x), _mm512_extractf64x4_pd(x, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

GRADCLIP_INLINE std::uint32_t count_equal(Floats a, Floats b) {
  return static_cast<std::uint32_t>(__builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ)));
}
GRADCLIP_INLINE std::uint32_t count_equal(Doubles a, Doubles b) {
  return static_cast<std::uint32_t>(__builtin_popcount(_mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ)));
}
GRADCLIP_INLINE std::uint32_t count_less(Floats a, Floats b) {
  return static_cast<std::uint32_t>(__builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)));
}
GRADCLIP_INLINE std::uint32_t count_less(Doubles a, Doubles b) {
  return static_cast<std::uint32_t>(__builtin_popcount(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ)));
}
GRADCLIP_INLINE Floats infinity_for_zero(Floats x) {
  const __mmask16 zero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
  return _mm512_mask_mov_ps(x, zero, broadcast(std::numeric_limits<float>::infinity()));
}
GRADCLIP_INLINE Doubles infinity_for_zero(Doubles x) {
  const __mmask8 zero = _mm512_cmp_pd_mask(x, _mm512_setzero_pd(), _CMP_EQ_OQ);
  return _mm512_mask_mov_pd(x, zero, broadcast(std::numeric_limits<double>::infinity()));
}

GRADCLIP_INLINE Floats canonical(Floats x) {
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(x, nan, broadcast(std::numeric_limits<float>::quiet_NaN()));
}
GRADCLIP_INLINE Doubles canonical(Doubles x) {
  const __mmask8 nan = _mm512_cmp_pd_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_pd(x, nan, broadcast(std::numeric_limits<double>::quiet_NaN()));
}
GRADCLIP_INLINE Floats zero_for_nonfinite(Floats x) {
  const Floats infinity = broadcast(std::numeric_limits<float>::infinity());
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(abs(x), infinity, _CMP_LT_OQ), x);
}
GRADCLIP_INLINE Doubles zero_for_nonfinite(Doubles x) {
  const Doubles infinity = broadcast(std::numeric_limits<double>::infinity());
  return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(abs(x), infinity, _CMP_LT_OQ), x);
}

GRADCLIP_INLINE Words zeros() {
  return _mm512_setzero_si512();
}
GRADCLIP_INLINE Words all_ones() {
  return _mm512_set1_epi32(-1);
}
GRADCLIP_INLINE Words repeat(std::uint8_t x) {
  return _mm512_set1_epi8(static_cast<char>(x));
}
GRADCLIP_INLINE Words repeat(std::uint16_t x) {
  return _mm512_set1_epi16(static_cast<short>(x));
}
template <DType D>
GRADCLIP_INLINE Words magnitudes_of(const BitsOf<D>* at) {
  return _mm512_and_si512(_mm512_loadu_si512(at), repeat(static_cast<BitsOf<D>>(Element<D>::kSign - 1)));
}
template <typename Bits>
GRADCLIP_INLINE Words max(Words a, Words b) {
  return sizeof(Bits) == 1 ? _mm512_max_epu8(a, b) : _mm512_max_epu16(a, b);
}
template <typename Bits>
GRADCLIP_INLINE Words min(Words a, Words b) {
  return sizeof(Bits) == 1 ? _mm512_min_epu8(a, b) : _mm512_min_epu16(a, b);
}
template <typename Bits>
GRADCLIP_INLINE Words less_one(Words x) {
  return sizeof(Bits) == 1 ? _mm512_sub_epi8(x, repeat(Bits{1})) : _mm512_sub_epi16(x, repeat(Bits{1}));
}
GRADCLIP_INLINE std::uint32_t count_equal(Words a, std::uint8_t b) {
  return static_cast<std::uint32_t>(__builtin_popcountll(_mm512_cmpeq_epi8_mask(a, repeat(b))));
}
GRADCLIP_INLINE std::uint32_t count_equal(Words a, std::uint16_t b) {
  return static_cast<std::uint32_t>(__builtin_popcount(_mm512_cmpeq_epi16_mask(a, repeat(b))));
}
GRADCLIP_INLINE std::uint32_t count_less(Words a, std::uint8_t b) {
  return static_cast<std::uint32_t>(__builtin_popcountll(_mm512_cmplt_epu8_mask(a, repeat(b))));
}
GRADCLIP_INLINE std::uint32_t count_less(Words a, std::uint16_t b) {
  return static_cast<std::uint32_t>(__builtin_popcount(_mm512_cmplt_epu16_mask(a, repeat(b))));
}
GRADCLIP_INLINE __m256i load_words(const std::uint16_t* at) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(static_cast<const void*>(at)));
}

template <DType D>
GRADCLIP_INLINE auto load_element(const BitsOf<D>* at) {
  if constexpr (D == DType::float64) {
    return _mm512_loadu_pd(at);
  } else if constexpr (D == DType::float32) {
    return _mm512_loadu_ps(at);
  } else if constexpr (D == DType::float16) {
    return _mm512_cvtph_ps(load_words(at));
  } else {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(at)), 16));
  }
}

/// For each word of a vector of float32 numbers, the word of a vector of bfloat16 numbers that belongs there: word j /
/// 2 of one half or the other.
struct WordIndices {
  alignas(64) std::uint16_t of[kWordLanes];
};
constexpr WordIndices word_indices(std::size_t first) {
  WordIndices indices{};
  for (std::size_t j = 0; j < kWordLanes; ++j) indices.of[j] = static_cast<std::uint16_t>(first + j / 2);
  return indices;
}
constexpr WordIndices kLowerHalf = word_indices(0);
constexpr WordIndices kUpperHalf = word_indices(16);

/// 16 elements of float8 as float16, and what their values are multiples of: float8_e5m2 is float16's upper half;
/// float8_e4m3fn has another bias, so that it is 2^8 times its bits' value, subnormals included.
template <DType D>
GRADCLIP_INLINE Floats float8_as_float16(const std::uint8_t* at) {
  const __m128i elements = _mm_loadu_si128(static_cast<const __m128i*>(static_cast<const void*>(at)));
  const __m256i words = _mm256_cvtepu8_epi16(elements);
  const __m256i upper = _mm256_slli_epi16(words, 8);
  if constexpr (D == DType::float8_e5m2) return _mm512_cvtph_ps(upper);
  const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(0x3F80));
  const __m256i sign = _mm256_and_si256(upper, _mm256_set1_epi16(static_cast<short>(0x8000)));
  return _mm512_cvtph_ps(_mm256_or_si256(magnitude, sign));
}

/// Widens a register of elements. @param scale_inv  of float8
template <DType D>
GRADCLIP_INLINE void expand(const BitsOf<D>* at, float scale_inv, float* out) {
  if constexpr (is_float8(D)) {
    const Floats unit = broadcast(D == DType::float8_e4m3fn ? 0x1p8F * scale_inv : scale_inv);
    for (std::size_t i = 0; i < sizeof(Words); i += 16) {
      _mm512_store_ps(out + i, mul(float8_as_float16<D>(at + i), unit));
    }
  } else if constexpr (D == DType::float16) {
    _mm512_store_ps(out, load_element<D>(at));
    _mm512_store_ps(out + 16, load_element<D>(at + 16));
  } else {
    // One permutation puts sixteen words into the upper halves of float32 numbers, zeros below.
    constexpr __mmask32 kUpperHalves = 0xAAAAAAAA;
    const __m512i words = _mm512_loadu_si512(at);
    const __m512i first = _mm512_load_si512(kLowerHalf.of);
    const __m512i second = _mm512_load_si512(kUpperHalf.of);
    _mm512_store_si512(out, _mm512_maskz_permutexvar_epi16(kUpperHalves, first, words));
    _mm512_store_si512(out + 16, _mm512_maskz_permutexvar_epi16(kUpperHalves, second, words));
  }
}

/// 64 bytes looked up: those with one upper half at a time, by their lower halves.
GRADCLIP_INLINE void look_up_register(const std::uint8_t* from, std::uint8_t* to, const std::uint8_t* table) {
  const Words x = _mm512_loadu_si512(from);
  const Words upper = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(0x0F));
  const Words lower = _mm512_and_si512(x, _mm512_set1_epi8(0x0F));
  Words found = zeros();
#pragma GCC unroll 16
  for (std::size_t half = 0; half < 16; ++half) {
    const auto* part = static_cast<const __m128i*>(static_cast<const void*>(table + 16 * half));
    const Words values = _mm512_broadcast_i32x4(_mm_loadu_si128(part));
    const __mmask64 here = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(static_cast<char>(half)));
    found = _mm512_mask_shuffle_epi8(found, here, values, lower);
  }
  _mm512_storeu_si512(to, found);
}

/// x rounded to D, as a vector of the same kind. @pre its NaNs are canonical, or those of an operation on elements of
/// D: then the addition that rounds to bfloat16 carries nothing out of a NaN's payload, whose lower half is 0.
template <DType D, typename Vector>
GRADCLIP_INLINE Vector round_to(Vector x) {
  if constexpr (D == DType::float16) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else if constexpr (D == DType::bfloat16) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), even);
    return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  } else {
    return x;
  }
}

/// The upper words of two vectors of float32 numbers, one after the other: 16 or more are words of the second.
constexpr WordIndices upper_words() {
  WordIndices indices{};
  for (std::size_t j = 0; j < kWordLanes; ++j) indices.of[j] = static_cast<std::uint16_t>(2 * j + 1);
  return indices;
}
constexpr WordIndices kUpperWords = upper_words();

/// Two vectors of numbers that are representable in D, of 16 bits, one after the other.
template <DType D>
GRADCLIP_INLINE void store_elements(std::uint16_t* at, Floats first, Floats second) {
  if constexpr (D == DType::float16) {
    const __m256i low = _mm512_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i high = _mm512_cvtps_ph(second, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm512_storeu_si512(at, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  } else {
    const __m512i upper = _mm512_load_si512(kUpperWords.of);
    _mm512_storeu_si512(at, _mm512_permutex2var_epi16(_mm512_castps_si512(first), upper, _mm512_castps_si512(second)));
  }
}

}  // namespace

#include "gradclip/backend/cpu/vector_loops.inl"

constinit const Kernels kAvx512Kernels = vector_kernels("avx512");

}  // namespace gradclip::cpu
