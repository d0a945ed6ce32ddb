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

template <typename Bits>
GRADCLIP_INLINE Bits largest_of(Words x) {
  Bits all[sizeof(Words) / sizeof(Bits)];
  std::memcpy(all, &x, sizeof all);
  return *std::max_element(std::begin(all), std::end(all));
}
template <typename Bits>
GRADCLIP_INLINE Bits smallest_of(Words x) {
  Bits all[sizeof(Words) / sizeof(Bits)];
  std::memcpy(all, &x, sizeof all);
  return *std::min_element(std::begin(all), std::end(all));
}

/// The lane sums of one sub-block in memory, and the extremes of what went into them.
template <typename T>
struct Sums {
  using Vector = decltype(broadcast(T{}));

  alignas(64) double power[kLanes];
  alignas(64) double sum[kLanes];
  Vector largest, smallest;
};

template <typename T>
GRADCLIP_INLINE void clear(Sums<T>& sums) {
  sums.largest = broadcast(T{0});
  sums.smallest = broadcast(std::numeric_limits<T>::infinity());
}

template <typename T>
GRADCLIP_INLINE SubBlock folded(Sums<T>& sums) {
  SubBlock result;
  result.power_sum = fold_lanes(sums.power);
  result.signed_sum = fold_lanes(sums.sum);
  result.max_abs = static_cast<double>(reduce_max(sums.largest));
  result.min_abs = static_cast<double>(reduce_min(sums.smallest));
  return result;
}

/// Narrow types: the extremes from their bits, the sums from numbers that are widened block by block.
template <DType D, int p>
GRADCLIP_INLINE SubBlock accumulate_narrow(const void* data, std::size_t rows, double scaling) {
  using Bits = BitsOf<D>;
  constexpr std::size_t kAtOnce = sizeof(Words) / sizeof(Bits);
  alignas(64) double power[kLanes];
  alignas(64) double sum[kLanes];
  alignas(64) float wide[kRowBlock * kLanes];
  const Doubles unscaled = broadcast(1.0);
  const auto* at = static_cast<const Bits*>(data);
  Words largest = zeros();
  Words smallest = all_ones();
  for (std::size_t row = 0; row < rows; row += kRowBlock) {
    const std::size_t block = rows - row < kRowBlock ? rows - row : kRowBlock;
    for (std::size_t i = 0; i < block * kLanes; i += kAtOnce, at += kAtOnce) {
      prefetch(at + kPrefetchRows * kLanes);
      const Words magnitudes = magnitudes_of<D>(at);
      largest = max<Bits>(largest, magnitudes);
      smallest = min<Bits>(smallest, magnitudes);
      expand<D>(at, static_cast<float>(scaling), wide + i);
    }
    add_rows<p>(wide, block, row == 0, unscaled, power, sum);
  }
  const Bits most = largest_of<Bits>(largest);
  SubBlock result;
  result.max_abs = value_of<D>(most, scaling);
  result.min_abs = value_of<D>(smallest_of<Bits>(smallest), scaling);
  result.power_sum = fold_lanes(power);
  result.signed_sum = fold_lanes(sum);
  // float8's NaNs and infinities need not have been widened as such.
  if (is_float8(D) && most >= Element<D>::kNonfinite) result.signed_sum = std::numeric_limits<double>::quiet_NaN();
  return result;
}

/// The others: the extremes from the numbers, which are ready.
template <DType D, int p>
GRADCLIP_INLINE SubBlock accumulate_wide(const void* data, std::size_t rows, double scaling) {
  using T = ComputeOf<D>;
  const Doubles scalings = broadcast(scaling);
  const auto* at = static_cast<const T*>(data);
  Sums<T> sums;
  clear(sums);
  for (std::size_t row = 0; row < rows; row += kRowBlock) {
    const std::size_t block = rows - row < kRowBlock ? rows - row : kRowBlock;
    for (std::size_t i = 0; i < block * kLanes; i += kVectorLanes<T>) {
      prefetch(at + i + kPrefetchRows * kLanes);
      const auto x = load(at + i);
      sums.largest = max_abs(sums.largest, x);
      sums.smallest = min_abs(sums.smallest, x);
    }
    add_rows<p>(at, block, row == 0, scalings, sums.power, sums.sum);
    at += block * kLanes;
  }
  return folded(sums);
}

template <DType D, int p>
GRADCLIP_TARGET SubBlock accumulate(const void* data, std::size_t rows, double scaling) {
  if constexpr (sizeof(BitsOf<D>) <= 2) {
    return accumulate_narrow<D, p>(data, rows, scaling);
  } else {
    return accumulate_wide<D, p>(data, rows, scaling);
  }
}

/// What a set of factors does to an element, in registers.
template <DType D>
struct Steps {
  using Vector = decltype(broadcast(ComputeOf<D>{}));

  ScaleStep kinds[3];
  Vector numbers[3];
  bool zero_nonfinite;
  Vector only;       ///< if one_product
  bool one_product;  ///< and nothing else: what most factors come down to
};

/// A factor's number in every lane; a NaN as the canonical one.
template <typename T>
GRADCLIP_INLINE auto factor_vector(double number) {
  return broadcast(number != number ? std::numeric_limits<T>::quiet_NaN() : static_cast<T>(number));
}

template <DType D>
GRADCLIP_INLINE Steps<D> steps_of(const ScaleFactors& factors) {
  using T = ComputeOf<D>;
  Steps<D> steps;
  const ScaleStep clip = factors.clip == ClipStep::none ? ScaleStep::none : ScaleStep::multiply;
  const ScaleStep kinds[3] = {factors.steps[0], factors.steps[1], clip};
  const double numbers[3] = {factors.numbers[0], factors.numbers[1], factors.coefficient};
  for (int i = 0; i < 3; ++i) {
    steps.kinds[i] = kinds[i];
    steps.numbers[i] = factor_vector<T>(numbers[i]);
  }
  int products = 0, divisions = 0;
  steps.only = steps.numbers[0];
  for (int i = 0; i < 3; ++i) {
    if (kinds[i] == ScaleStep::multiply) steps.only = steps.numbers[i];
    products += kinds[i] == ScaleStep::multiply ? 1 : 0;
    divisions += kinds[i] == ScaleStep::divide ? 1 : 0;
  }
  steps.zero_nonfinite = factors.zero_nonfinite;
  steps.one_product = products == 1 && divisions == 0 && !factors.zero_nonfinite;
  return steps;
}

/// Whether a NaN has to become the canonical one: where it is stored. Where it only spoils a sum, any will do.
enum class Nan : std::uint8_t { any, canonical };

template <DType D, Nan kNan, typename Vector>
GRADCLIP_INLINE Vector round_step(Vector x) {
  return round_to<D>(kNan == Nan::canonical ? canonical(x) : x);
}

template <DType D, Nan kNan, typename Vector>
GRADCLIP_INLINE Vector scale_step_of(Vector x, ScaleStep step, Vector number) {
  if (step == ScaleStep::divide) return round_step<D, kNan>(div(x, number));
  if (step == ScaleStep::multiply) return round_step<D, kNan>(mul(x, number));
  return x;
}

template <DType D, Nan kNan, bool kOneProduct, typename Vector>
GRADCLIP_INLINE Vector scaled(Vector x, const Steps<D>& steps) {
  if constexpr (kOneProduct) return round_step<D, kNan>(mul(x, steps.only));
  x = scale_step_of<D, kNan>(x, steps.kinds[0], steps.numbers[0]);
  x = scale_step_of<D, kNan>(x, steps.kinds[1], steps.numbers[1]);
  if (steps.zero_nonfinite) x = zero_for_nonfinite(x);
  return scale_step_of<D, kNan>(x, steps.kinds[2], steps.numbers[2]);
}

/// `count` elements scaled, as numbers.
template <DType D, bool kOneProduct, typename T>
GRADCLIP_INLINE void scale_block(const BitsOf<D>* at, std::size_t count, const Steps<D>& steps, T* wide,
                                 Sums<T>& sums) {
  for (std::size_t i = 0; i < count; i += kVectorLanes<T>) {
    prefetch(at + i + kPrefetchRows * kLanes);
    const auto x = scaled<D, Nan::any, kOneProduct>(load_element<D>(at + i), steps);
    sums.largest = max_abs(sums.largest, x);
    sums.smallest = min_abs(sums.smallest, x);
    store(wide + i, x);
  }
}

template <DType D, int p>
GRADCLIP_TARGET SubBlock accumulate_scaled(const void* data, std::size_t rows, const ScaleFactors& factors,
                                           double scaling) {
  using T = ComputeOf<D>;
  alignas(64) T wide[kRowBlock * kLanes];
  const auto* at = static_cast<const BitsOf<D>*>(data);
  const Steps<D> steps = steps_of<D>(factors);
  const Doubles scalings = broadcast(scaling);
  Sums<T> sums;
  clear(sums);
  for (std::size_t row = 0; row < rows; row += kRowBlock) {
    const std::size_t block = rows - row < kRowBlock ? rows - row : kRowBlock;
    if (steps.one_product) {
      scale_block<D, true>(at, block * kLanes, steps, wide, sums);
    } else {
      scale_block<D, false>(at, block * kLanes, steps, wide, sums);
    }
    add_rows<p>(wide, block, row == 0, scalings, sums.power, sums.sum);
    at += block * kLanes;
  }
  return folded(sums);
}

template <DType D>
GRADCLIP_TARGET SmallElements count_small(const void* data, std::size_t rows) {
  const auto* at = static_cast<const BitsOf<D>*>(data);
  std::uint32_t zeros = 0;
  std::uint32_t below_normal = 0;
  if constexpr (sizeof(BitsOf<D>) <= 2) {
    using Bits = BitsOf<D>;
    Words smallest = all_ones();
    for (std::size_t i = 0; i < rows * kLanes; i += sizeof(Words) / sizeof(Bits)) {
      const Words x = magnitudes_of<D>(at + i);
      zeros += count_equal(x, Bits{0});
      below_normal += count_less(x, Element<D>::kSmallestNormal);
      smallest = min<Bits>(smallest, less_one<Bits>(x));  // a zero becomes the largest
    }
    const auto nonzero = static_cast<Bits>(smallest_of<Bits>(smallest) + 1);
    return {zeros, below_normal - zeros,
            nonzero == 0 ? std::numeric_limits<double>::infinity() : static_cast<double>(Element<D>::widen(nonzero))};
  } else {
    using T = ComputeOf<D>;
    const auto zero = broadcast(T{0});
    const auto normal = broadcast(Element<D>::widen(Element<D>::kSmallestNormal));
    auto smallest = broadcast(std::numeric_limits<T>::infinity());
    for (std::size_t i = 0; i < rows * kLanes; i += kVectorLanes<T>) {
      const auto x = abs(load_element<D>(at + i));
      zeros += count_equal(x, zero);
      below_normal += count_less(x, normal);
      smallest = min_abs(smallest, infinity_for_zero(x));
    }
    return {zeros, below_normal - zeros, static_cast<double>(reduce_min(smallest))};
  }
}

GRADCLIP_INLINE float* floating(std::uint32_t* at) {
  return static_cast<float*>(static_cast<void*>(at));
}
GRADCLIP_INLINE double* floating(std::uint64_t* at) {
  return static_cast<double*>(static_cast<void*>(at));
}

/// @return how many elements: all but what fills no register.
template <DType D, bool kOneProduct>
GRADCLIP_INLINE std::size_t scale_vectors(const BitsOf<D>* source, BitsOf<D>* target, std::size_t count,
                                          const Steps<D>& steps) {
  constexpr std::size_t kStored = sizeof(Words) / sizeof(BitsOf<D>);  // at once: a whole register
  std::size_t i = 0;
  for (; i + kStored <= count; i += kStored) {
    prefetch(source + i + kPrefetchRows * kLanes);
    const auto x = scaled<D, Nan::canonical, kOneProduct>(load_element<D>(source + i), steps);
    if constexpr (sizeof(BitsOf<D>) == 2) {
      const auto next = load_element<D>(source + i + kStored / 2);
      store_elements<D>(target + i, x, scaled<D, Nan::canonical, kOneProduct>(next, steps));
    } else {
      store(floating(target) + i, x);
    }
  }
  return i;
}

template <DType D>
GRADCLIP_TARGET void scale(const void* from, void* to, std::size_t count, const ScaleFactors& factors) {
  const auto* source = static_cast<const BitsOf<D>*>(from);
  auto* target = static_cast<BitsOf<D>*>(to);
  const Steps<D> steps = steps_of<D>(factors);
  std::size_t i = steps.one_product ? scale_vectors<D, true>(source, target, count, steps)
                                    : scale_vectors<D, false>(source, target, count, steps);
  for (; i < count; ++i) target[i] = scale_element<D>(source[i], factors);
}

GRADCLIP_TARGET void look_up(const std::uint8_t* from, std::uint8_t* to, std::size_t count, const std::uint8_t* table) {
  std::size_t i = 0;
  for (; i + sizeof(Words) <= count; i += sizeof(Words)) {
    prefetch(from + i + kPrefetchRows * kLanes);
    look_up_register(from + i, to + i, table);
  }
  for (; i < count; ++i) to[i] = table[from[i]];
}

template <DType D>
constexpr std::array<Accumulate, kVectorPowers> powers() {
  return {accumulate<D, 0>, accumulate<D, 1>, accumulate<D, 2>, accumulate<D, 3>, accumulate<D, 4>};
}
template <DType D>
constexpr std::array<AccumulateScaled, kVectorPowers> scaled_powers() {
  return {accumulate_scaled<D, 0>, accumulate_scaled<D, 1>, accumulate_scaled<D, 2>, accumulate_scaled<D, 3>,
          accumulate_scaled<D, 4>};
}

constexpr Kernels vector_kernels(std::string_view name) {
  using enum DType;
  return {name,
          {powers<float64>(), powers<float32>(), powers<float16>(), powers<bfloat16>(), powers<float8_e4m3fn>(),
           powers<float8_e5m2>()},
          {scaled_powers<float64>(), scaled_powers<float32>(), scaled_powers<float16>(), scaled_powers<bfloat16>()},
          {count_small<float64>, count_small<float32>, count_small<float16>, count_small<bfloat16>,
           count_small<float8_e4m3fn>, count_small<float8_e5m2>},
          {scale<float64>, scale<float32>, scale<float16>, scale<bfloat16>},
          look_up};
}

}  // namespace
