// The inner loops for AVX2: 16 lanes of a row block at a time, as sixteen registers allow.

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <limits>

#include "gradclip/backend/cpu/kernels.hpp"

#define GRADCLIP_TARGET __attribute__((target("avx2,fma,f16c")))
#define GRADCLIP_INLINE GRADCLIP_TARGET __attribute__((always_inline)) inline

namespace gradclip::cpu {
namespace {

using Floats = __m256;
using Doubles = __m256d;
using Words = __m256i;

constexpr std::size_t kDoubleLanes = 4;
constexpr std::size_t kColumns = 16;
template <typename T>
constexpr std::size_t kVectorLanes = 32 / sizeof(T);

GRADCLIP_INLINE Floats load(const float* at) {
  return _mm256_loadu_ps(at);
}
GRADCLIP_INLINE Doubles load(const double* at) {
  return _mm256_loadu_pd(at);
}
GRADCLIP_INLINE Doubles widen(const float* at) {
  return _mm256_cvtps_pd(_mm_loadu_ps(at));
}
GRADCLIP_INLINE void store(float* at, Floats x) {
  _mm256_storeu_ps(at, x);
}
GRADCLIP_INLINE void store(double* at, Doubles x) {
  _mm256_storeu_pd(at, x);
}
GRADCLIP_INLINE Floats broadcast(float x) {
  return _mm256_set1_ps(x);
}
GRADCLIP_INLINE Doubles broadcast(double x) {
  return _mm256_set1_pd(x);
}

GRADCLIP_INLINE Doubles add(Doubles a, Doubles b) {
  return _mm256_add_pd(a, b);
}
GRADCLIP_INLINE Doubles add_exact_product(Doubles a, Doubles x, Doubles y) {
  return _mm256_fmadd_pd(x, y, a);
}
GRADCLIP_INLINE Floats mul(Floats a, Floats b) {
  return _mm256_mul_ps(a, b);
}
GRADCLIP_INLINE Doubles mul(Doubles a, Doubles b) {
  return _mm256_mul_pd(a, b);
}
GRADCLIP_INLINE Floats div(Floats a, Floats b) {
  return _mm256_div_ps(a, b);
}
GRADCLIP_INLINE Doubles div(Doubles a, Doubles b) {
  return _mm256_div_pd(a, b);
}
GRADCLIP_INLINE Floats abs(Floats x) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x);
}
GRADCLIP_INLINE Doubles abs(Doubles x) {
  return _mm256_andnot_pd(_mm256_set1_pd(-0.0), x);
}

GRADCLIP_INLINE Floats max_abs(Floats a, Floats b) {
  return _mm256_max_ps(a, abs(b));
}
GRADCLIP_INLINE Floats min_abs(Floats a, Floats b) {
  return _mm256_min_ps(a, abs(b));
}
GRADCLIP_INLINE Doubles max_abs(Doubles a, Doubles b) {
  return _mm256_max_pd(a, abs(b));
}
GRADCLIP_INLINE Doubles min_abs(Doubles a, Doubles b) {
  return _mm256_min_pd(a, abs(b));
}

GRADCLIP_INLINE float reduce_max(Floats x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
GRADCLIP_INLINE float reduce_min(Floats x) {
  const __m128 four = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
}
GRADCLIP_INLINE double reduce_max(Doubles x) {
  const __m128d two = _mm_max_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
  return _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
}
GRADCLIP_INLINE double reduce_min(Doubles x) {
  const __m128d two = _mm_min_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
  return _mm_cvtsd_f64(_mm_min_sd(two, _mm_unpackhi_pd(two, two)));
}

GRADCLIP_INLINE double fold_vector(Doubles x) {
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

GRADCLIP_INLINE std::uint32_t count_true(Floats mask) {
  return static_cast<std::uint32_t>(__builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(mask))));
}
GRADCLIP_INLINE std::uint32_t count_true(Doubles mask) {
  return static_cast<std::uint32_t>(__builtin_popcount(static_cast<unsigned>(_mm256_movemask_pd(mask))));
}
GRADCLIP_INLINE std::uint32_t count_equal(Floats a, Floats b) {
  return count_true(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
GRADCLIP_INLINE std::uint32_t count_equal(Doubles a, Doubles b) {
  return count_true(_mm256_cmp_pd(a, b, _CMP_EQ_OQ));
}
GRADCLIP_INLINE std::uint32_t count_less(Floats a, Floats b) {
  return count_true(_mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
GRADCLIP_INLINE std::uint32_t count_less(Doubles a, Doubles b) {
  return count_true(_mm256_cmp_pd(a, b, _CMP_LT_OQ));
}
GRADCLIP_INLINE Floats infinity_for_zero(Floats x) {
  const Floats zero = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ);
  return _mm256_blendv_ps(x, broadcast(std::numeric_limits<float>::infinity()), zero);
}
GRADCLIP_INLINE Doubles infinity_for_zero(Doubles x) {
  const Doubles zero = _mm256_cmp_pd(x, _mm256_setzero_pd(), _CMP_EQ_OQ);
  return _mm256_blendv_pd(x, broadcast(std::numeric_limits<double>::infinity()), zero);
}

GRADCLIP_INLINE Floats canonical(Floats x) {
  const Floats nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_ps(x, broadcast(std::numeric_limits<float>::quiet_NaN()), nan);
}
GRADCLIP_INLINE Doubles canonical(Doubles x) {
  const Doubles nan = _mm256_cmp_pd(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_pd(x, broadcast(std::numeric_limits<double>::quiet_NaN()), nan);
}
GRADCLIP_INLINE Floats zero_for_nonfinite(Floats x) {
  const Floats infinity = broadcast(std::numeric_limits<float>::infinity());
  return _mm256_and_ps(_mm256_cmp_ps(abs(x), infinity, _CMP_LT_OQ), x);
}
GRADCLIP_INLINE Doubles zero_for_nonfinite(Doubles x) {
  const Doubles infinity = broadcast(std::numeric_limits<double>::infinity());
  return _mm256_and_pd(_mm256_cmp_pd(abs(x), infinity, _CMP_LT_OQ), x);
}

GRADCLIP_INLINE __m128i load_words(const std::uint16_t* at) {
  return _mm_loadu_si128(static_cast<const __m128i*>(static_cast<const void*>(at)));
}
GRADCLIP_INLINE Words zeros() {
  return _mm256_setzero_si256();
}
GRADCLIP_INLINE Words all_ones() {
  return _mm256_set1_epi32(-1);
}
GRADCLIP_INLINE Words repeat(std::uint8_t x) {
  return _mm256_set1_epi8(static_cast<char>(x));
}
GRADCLIP_INLINE Words repeat(std::uint16_t x) {
  return _mm256_set1_epi16(static_cast<short>(x));
}
template <DType D>
GRADCLIP_INLINE Words magnitudes_of(const BitsOf<D>* at) {
  const Words elements = _mm256_loadu_si256(static_cast<const __m256i*>(static_cast<const void*>(at)));
  return _mm256_and_si256(elements, repeat(static_cast<BitsOf<D>>(Element<D>::kSign - 1)));
}
template <typename Bits>
GRADCLIP_INLINE Words max(Words a, Words b) {
  return sizeof(Bits) == 1 ? _mm256_max_epu8(a, b) : _mm256_max_epu16(a, b);
}
template <typename Bits>
GRADCLIP_INLINE Words min(Words a, Words b) {
  return sizeof(Bits) == 1 ? _mm256_min_epu8(a, b) : _mm256_min_epu16(a, b);
}
template <typename Bits>
GRADCLIP_INLINE Words less_one(Words x) {
  return sizeof(Bits) == 1 ? _mm256_sub_epi8(x, repeat(Bits{1})) : _mm256_sub_epi16(x, repeat(Bits{1}));
}
GRADCLIP_INLINE std::uint32_t count_ones(Words mask) {
  return static_cast<std::uint32_t>(__builtin_popcount(static_cast<unsigned>(_mm256_movemask_epi8(mask))));
}
GRADCLIP_INLINE std::uint32_t count_equal(Words a, std::uint8_t b) {
  return count_ones(_mm256_cmpeq_epi8(a, repeat(b)));
}
GRADCLIP_INLINE std::uint32_t count_equal(Words a, std::uint16_t b) {
  return count_ones(_mm256_cmpeq_epi16(a, repeat(b))) / 2;
}
/// @pre magnitudes: comparisons are signed
GRADCLIP_INLINE std::uint32_t count_less(Words a, std::uint8_t b) {
  return count_ones(_mm256_cmpgt_epi8(repeat(b), a));
}
GRADCLIP_INLINE std::uint32_t count_less(Words a, std::uint16_t b) {
  return count_ones(_mm256_cmpgt_epi16(repeat(b), a)) / 2;
}
template <DType D>
GRADCLIP_INLINE auto load_element(const BitsOf<D>* at) {
  if constexpr (D == DType::float64) {
    return _mm256_loadu_pd(static_cast<const double*>(static_cast<const void*>(at)));
  } else if constexpr (D == DType::float32) {
    return _mm256_loadu_ps(static_cast<const float*>(static_cast<const void*>(at)));
  } else if constexpr (D == DType::float16) {
    return _mm256_cvtph_ps(load_words(at));
  } else {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(at)), 16));
  }
}

/// 8 elements of float8 as float16, and what their values are multiples of: float8_e5m2 is float16's upper half;
/// float8_e4m3fn has another bias, so that it is 2^8 times its bits' value, subnormals included.
template <DType D>
GRADCLIP_INLINE Floats float8_as_float16(const std::uint8_t* at) {
  const __m128i elements = _mm_loadl_epi64(static_cast<const __m128i*>(static_cast<const void*>(at)));
  const __m128i words = _mm_cvtepu8_epi16(elements);
  const __m128i upper = _mm_slli_epi16(words, 8);
  if constexpr (D == DType::float8_e5m2) return _mm256_cvtph_ps(upper);
  const __m128i magnitude = _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(0x3F80));
  const __m128i sign = _mm_and_si128(upper, _mm_set1_epi16(static_cast<short>(0x8000)));
  return _mm256_cvtph_ps(_mm_or_si128(magnitude, sign));
}

/// Widens a register of elements. @param scale_inv  of float8
template <DType D>
GRADCLIP_INLINE void expand(const BitsOf<D>* at, float scale_inv, float* out) {
  if constexpr (is_float8(D)) {
    const Floats unit = broadcast(D == DType::float8_e4m3fn ? 0x1p8F * scale_inv : scale_inv);
    for (std::size_t i = 0; i < sizeof(Words); i += 8) {
      _mm256_store_ps(out + i, mul(float8_as_float16<D>(at + i), unit));
    }
  } else {
    _mm256_store_ps(out, load_element<D>(at));
    _mm256_store_ps(out + 8, load_element<D>(at + 8));
  }
}

/// 32 bytes looked up: those with one upper half at a time, by their lower halves.
GRADCLIP_INLINE void look_up_register(const std::uint8_t* from, std::uint8_t* to, const std::uint8_t* table) {
  const Words x = _mm256_loadu_si256(static_cast<const __m256i*>(static_cast<const void*>(from)));
  const Words upper = _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(0x0F));
  const Words lower = _mm256_and_si256(x, _mm256_set1_epi8(0x0F));
  Words found = zeros();
#pragma GCC unroll 16
  for (std::size_t half = 0; half < 16; ++half) {
    const auto* part = static_cast<const __m128i*>(static_cast<const void*>(table + 16 * half));
    const Words values = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(part)), lower);
    const Words here = _mm256_cmpeq_epi8(upper, _mm256_set1_epi8(static_cast<char>(half)));
    found = _mm256_blendv_epi8(found, values, here);
  }
  _mm256_storeu_si256(static_cast<__m256i*>(static_cast<void*>(to)), found);
}

/// x rounded to D, as a vector of the same kind. @pre its NaNs are canonical, or those of an operation on elements of
/// D: then the addition that rounds to bfloat16 carries nothing out of a NaN's payload, whose lower half is 0.
template <DType D, typename Vector>
GRADCLIP_INLINE Vector round_to(Vector x) {
  if constexpr (D == DType::float16) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else if constexpr (D == DType::bfloat16) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), even);
    return _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  } else {
    return x;
  }
}

/// Two vectors of numbers that are representable in D, of 16 bits, one after the other.
template <DType D>
GRADCLIP_INLINE void store_elements(std::uint16_t* at, Floats first, Floats second) {
  Words words;
  if constexpr (D == DType::float16) {
    const __m128i low = _mm256_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    words = _mm256_set_m128i(_mm256_cvtps_ph(second, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), low);
  } else {
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(second), 16);
    words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), _MM_SHUFFLE(3, 1, 2, 0));
  }
  _mm256_storeu_si256(static_cast<__m256i*>(static_cast<void*>(at)), words);
}

}  // namespace

#include "gradclip/backend/cpu/vector_loops.inl"

constinit const Kernels kAvx2Kernels = vector_kernels("avx2");

}  // namespace gradclip::cpu
