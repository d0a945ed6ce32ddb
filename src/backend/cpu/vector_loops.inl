// The inner loops over the vector operations that the including file defines for its instruction set. Included inside
// namespace gradclip::cpu.
//
// Nothing compiled for a newer processor may leave its file: the linker keeps one copy of an inline function or
// template that several files share, and it could be the one that an older processor cannot run. So no file is compiled
// with -m flags; the functions that use the instructions carry a target attribute and stand in an unnamed namespace,
// and whatever they call from shared headers is compiled for every processor. Lambdas do not inherit the attribute:
// none here.

namespace {

/// Rows that are widened to float32 in a first step, while they are in the nearest cache, and added in a second.
constexpr std::size_t kRowBlock = 8;

/// How far ahead the first step asks for memory, so that it comes while the second step adds. An address past the data
/// does no harm.
constexpr std::size_t kPrefetchRows = 2 * kRowBlock;

GRADCLIP_INLINE void prefetch(const void* at) {
  __builtin_prefetch(at);
}

template <int p>
GRADCLIP_INLINE Doubles add_term(Doubles sum, Doubles x) {
  if constexpr (p == 1) return add(sum, abs(x));
  const Doubles square = mul(x, x);
  if constexpr (p == 2) return add(sum, square);
  if constexpr (p == 3) return add(sum, mul(square, abs(x)));
  return add(sum, mul(square, square));
}

GRADCLIP_INLINE Doubles read(const float* at, Doubles) {
  return widen(at);
}
GRADCLIP_INLINE Doubles read(const double* at, Doubles scaling) {
  return mul(load(at), scaling);
}

/// Adds rows to the lane sums in memory, as many lanes at a time as the registers hold. The first rows find no sums
/// yet.
template <int p, typename T>
GRADCLIP_INLINE void add_rows(const T* values, std::size_t rows, bool first, Doubles scaling, double* power,
                              double* sum) {
  constexpr std::size_t kVectors = kColumns / kDoubleLanes;
  for (std::size_t column = 0; column < kLanes; column += kColumns) {
    Doubles powers[kVectors];
    Doubles sums[kVectors];
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kVectors; ++i) {
      powers[i] = first ? broadcast(0.0) : load(power + column + i * kDoubleLanes);
      sums[i] = first ? broadcast(0.0) : load(sum + column + i * kDoubleLanes);
    }
    const T* at = values + column;
    for (std::size_t row = 0; row < rows; ++row, at += kLanes) {
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kVectors; ++i) {
        const Doubles x = read(at + i * kDoubleLanes, scaling);
        // The square of a float32 number is exact in float64, so that here one instruction for both rounds as two
        // would.
        if constexpr (p == 2 && sizeof(T) == sizeof(float)) {
          powers[i] = add_exact_product(powers[i], x, x);
        } else if constexpr (p > 0) {
          powers[i] = add_term<p>(powers[i], x);
        }
        sums[i] = add(sums[i], x);
      }
    }
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kVectors; ++i) {
      store(power + column + i * kDoubleLanes, powers[i]);
      store(sum + column + i * kDoubleLanes, sums[i]);
    }
  }
}

GRADCLIP_INLINE double fold_lanes(double* lanes) {
  for (std::size_t half = kLanes / 2; half >= kDoubleLanes; half /= 2) {
    for (std::size_t j = 0; j < half; j += kDoubleLanes) {
      store(lanes + j, add(load(lanes + j), load(lanes + j + half)));
    }
  }
  return fold_vector(load(lanes));
}

template <DType D, int p>
GRADCLIP_TARGET SubBlock accumulate(const void* data, std::size_t rows, double scaling) {
  alignas(64) double power[kLanes];
  alignas(64) double sum[kLanes];
  const Doubles scalings = broadcast(scaling);
  SubBlock result;
  if constexpr (sizeof(BitsOf<D>) == 2) {
    alignas(64) float wide[kRowBlock * kLanes];
    const auto* at = static_cast<const std::uint16_t*>(data);
    Words largest = no_words();
    Words smallest = all_words();
    for (std::size_t row = 0; row < rows; row += kRowBlock) {
      const std::size_t block = rows - row < kRowBlock ? rows - row : kRowBlock;
      for (std::size_t i = 0; i < block * kLanes; i += kWordLanes, at += kWordLanes) {
        prefetch(at + kPrefetchRows * kLanes);
        const Words magnitudes = word_magnitudes(at);
        largest = max(largest, magnitudes);
        smallest = min(smallest, magnitudes);
        expand<D>(at, wide + i);
      }
      add_rows<p>(wide, block, row == 0, scalings, power, sum);
    }
    result.max_abs = static_cast<double>(Element<D>::widen(reduce_max(largest)));
    result.min_abs = static_cast<double>(Element<D>::widen(reduce_min(smallest)));
  } else {
    using T = ComputeOf<D>;
    const auto* at = static_cast<const T*>(data);
    auto largest = broadcast(T{0});
    auto smallest = broadcast(std::numeric_limits<T>::infinity());
    for (std::size_t row = 0; row < rows; row += kRowBlock) {
      const std::size_t block = rows - row < kRowBlock ? rows - row : kRowBlock;
      for (std::size_t i = 0; i < block * kLanes; i += kVectorLanes<T>) {
        prefetch(at + i + kPrefetchRows * kLanes);
        const auto x = load(at + i);
        largest = max_abs(largest, x);
        smallest = min_abs(smallest, x);
      }
      add_rows<p>(at, block, row == 0, scalings, power, sum);
      at += block * kLanes;
    }
    result.max_abs = static_cast<double>(reduce_max(largest));
    result.min_abs = static_cast<double>(reduce_min(smallest));
  }
  result.power_sum = fold_lanes(power);
  result.signed_sum = fold_lanes(sum);
  return result;
}

template <DType D>
GRADCLIP_TARGET SmallElements count_small(const void* data, std::size_t rows) {
  using T = ComputeOf<D>;
  const auto* at = static_cast<const BitsOf<D>*>(data);
  const auto zero = broadcast(T{0});
  const auto normal = broadcast(Element<D>::widen(Element<D>::kSmallestNormal));
  auto smallest = broadcast(std::numeric_limits<T>::infinity());
  std::uint32_t zeros = 0;
  std::uint32_t below_normal = 0;
  for (std::size_t i = 0; i < rows * kLanes; i += kVectorLanes<T>) {
    const auto x = abs(load_element<D>(at + i));
    zeros += count_equal(x, zero);
    below_normal += count_less(x, normal);
    smallest = min_abs(smallest, infinity_for_zero(x));
  }
  return {zeros, below_normal - zeros, static_cast<double>(reduce_min(smallest))};
}

template <DType D, typename Vector>
GRADCLIP_INLINE Vector scale_step_of(Vector x, ScaleStep step, Vector number) {
  if (step == ScaleStep::divide) return round_to<D>(div(x, number));
  if (step == ScaleStep::multiply) return round_to<D>(mul(x, number));
  return x;
}

template <DType D>
GRADCLIP_TARGET void scale(const void* from, void* to, std::size_t count, const ScaleFactors& factors) {
  using T = ComputeOf<D>;
  const auto* source = static_cast<const BitsOf<D>*>(from);
  auto* target = static_cast<BitsOf<D>*>(to);
  const auto first = broadcast(static_cast<T>(factors.numbers[0]));
  const auto second = broadcast(static_cast<T>(factors.numbers[1]));
  const auto coefficient = broadcast(static_cast<T>(factors.coefficient));
  const ScaleStep clip = factors.clip == ClipStep::none ? ScaleStep::none : ScaleStep::multiply;
  std::size_t i = 0;
  for (; i + kVectorLanes<T> <= count; i += kVectorLanes<T>) {
    auto x = load_element<D>(source + i);
    x = scale_step_of<D>(x, factors.steps[0], first);
    x = scale_step_of<D>(x, factors.steps[1], second);
    if (factors.zero_nonfinite) x = zero_for_nonfinite(x);
    x = scale_step_of<D>(x, clip, coefficient);
    store_element<D>(target + i, x);
  }
  for (; i < count; ++i) target[i] = scale_element<D>(source[i], factors);
}

template <DType D>
constexpr std::array<Accumulate, kVectorPowers> powers() {
  return {accumulate<D, 0>, accumulate<D, 1>, accumulate<D, 2>, accumulate<D, 3>, accumulate<D, 4>};
}

constexpr Kernels vector_kernels(std::string_view name) {
  return {name,
          {powers<DType::float64>(), powers<DType::float32>(), powers<DType::float16>(), powers<DType::bfloat16>()},
          {count_small<DType::float64>, count_small<DType::float32>, count_small<DType::float16>,
           count_small<DType::bfloat16>},
          {scale<DType::float64>, scale<DType::float32>, scale<DType::float16>, scale<DType::bfloat16>}};
}

}  // namespace
