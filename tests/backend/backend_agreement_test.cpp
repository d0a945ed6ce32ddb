// Every backend against the reference, bit for bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/backend/cpu/cpu_backend.hpp"
#include "gradclip/backend/cuda/cuda_backend.hpp"
#include "gradclip/backend/reduction.hpp"
#include "reference_backend.hpp"

namespace gradclip {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Backends
// ---------------------------------------------------------------------------------------------------------------------

/// The backends of this executable: all of this machine's; or, where the build says so, one that must run: the emulated
/// device, for which blocks are expensive.
#if defined(GRADCLIP_ONLY_BACKEND)
constexpr const char* kBackends[] = {GRADCLIP_ONLY_BACKEND};
constexpr bool kMustRun = true;
#else
constexpr const char* kBackends[] = {"cpu_baseline", "cpu_avx2", "cpu_avx512", "cuda"};
constexpr bool kMustRun = false;
#endif

constexpr DType kTypes[] = {DType::float64,  DType::float32,       DType::float16,
                            DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2};

/// A backend by its name here; empty where this machine cannot run it.
std::unique_ptr<Backend> make(const std::string& name) {
  if (name == "cuda") return try_cuda_backend(0).backend;
  for (const cpu::Kernels* kernels : cpu::supported_kernels()) {
    if (name == "cpu_" + std::string(kernels->name)) return std::make_unique<CpuBackend>(*kernels);
  }
  return nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// Data
// ---------------------------------------------------------------------------------------------------------------------

enum class Kind { wide, spread, special, all_nonfinite, mostly_zero, rare, huge, tiny };

/// Bits of one element. `wide` draws from all finite magnitudes alike; `spread` from so many exponents that most
/// elements still touch the last bits of a sum in float64: every order of such a sum has other bits. `rare` is `spread`
/// but for a few elements that need care, so that some threads meet one and others none. Sums of `huge` and products of
/// `huge` and `tiny` leave float64's range if they are not scaled.
std::uint64_t draw(DType dtype, Kind kind, std::mt19937_64& random) {
  const std::uint64_t sign = std::uint64_t{random() & 1} << (8 * size_of(dtype) - 1);
  const std::uint64_t nonfinite = reference::encode(dtype, std::numeric_limits<double>::infinity());
  const auto wide = [&] { return sign | random() % nonfinite; };
  const auto spread = [&] {
    const int half_range = size_of(dtype) == 1 ? 5 : size_of(dtype) == 2 ? 11 : 20;
    const double exponent = std::uniform_real_distribution<double>(-half_range, half_range)(random);
    const double x = std::exp2(exponent);
    return sign | reference::encode(dtype, dtype == DType::float64 ? x : static_cast<double>(static_cast<float>(x)));
  };
  const auto nonfinite_bits = [&]() -> std::uint64_t {
    switch (random() % 4) {
      case 0:
        return reference::encode(dtype, std::numeric_limits<double>::infinity());
      case 1:
        return reference::encode(dtype, -std::numeric_limits<double>::infinity());
      case 2:
        return sign | (dtype == DType::float8_e4m3fn ? nonfinite : nonfinite | 1);  // not the canonical NaN
      default:
        return sign | reference::encode(dtype, std::numeric_limits<double>::quiet_NaN());
    }
  };
  const auto subnormal = [&] { return sign | (random() % 3 + 1); };
  const auto small_normal = [&] {
    std::uint64_t magnitude = 0;
    while (magnitude == 0 || reference::is_subnormal(dtype, magnitude)) magnitude = random() % (nonfinite / 8);
    return sign | magnitude;
  };
  switch (kind) {
    case Kind::wide:
      return wide();
    case Kind::spread:
      return spread();
    case Kind::all_nonfinite:
      return nonfinite_bits();
    case Kind::mostly_zero:
      return random() % 8 != 0 ? sign : spread();
    case Kind::rare:
      if (random() % 1500 != 0) return spread();
      return random() % 2 == 0 ? subnormal() : nonfinite_bits();
    case Kind::huge:
      return sign | (nonfinite - 1 - random() % std::max<std::uint64_t>(1, nonfinite / 256));
    case Kind::tiny:
      return small_normal();
    case Kind::special:
      switch (random() % 16) {
        case 0:
          return random() % 64 == 0 ? nonfinite_bits() : spread();
        case 1:
          return subnormal();
        case 2:
          return sign;
        case 3:
          return wide();
        default:
          return spread();
      }
  }
  return 0;
}

/// Chunks in one allocation, in turn aligned for vectors and at an odd number of elements behind such a place.
struct Tensors {
  std::vector<std::byte> bytes;
  std::vector<Chunk> chunks;

  /// @param turn  chunks that are aligned before as many that are not
  explicit Tensors(std::size_t turn = 1) : turn_(turn) {}

  void add(DType dtype, Kind kind, std::uint32_t count, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const std::size_t odd = chunks.size() / turn_ % 2 == 0 ? 0 : 2 * (chunks.size() / 2 % 4) + 1;
    const std::size_t offset = (bytes.size() + 63) / 64 * 64 + odd * size_of(dtype);
    bytes.resize(offset + count * size_of(dtype));
    offsets_.push_back(offset);
    chunks.push_back({nullptr, count, dtype, 0});
    for (std::size_t i = 0; i < count; ++i) {
      reference::store(dtype, bytes.data() + offset, i, draw(dtype, kind, random));
    }
    point();
  }
  void point() {
    for (std::size_t i = 0; i < chunks.size(); ++i) chunks[i].data = bytes.data() + offsets_[i];
  }
  Tensors(const Tensors& other)
      : bytes(other.bytes), chunks(other.chunks), turn_(other.turn_), offsets_(other.offsets_) {
    point();
  }
  Tensors& operator=(const Tensors&) = delete;
  ~Tensors() = default;

  [[nodiscard]] const std::vector<std::size_t>& offsets() const { return offsets_; }

 private:
  std::size_t turn_;
  std::vector<std::size_t> offsets_;
};

Tensors small_tensors(DType dtype) {
  Tensors tensors;
  std::uint64_t seed = 1;
  for (const Kind kind : {Kind::wide, Kind::special}) {  // an odd number of counts: each is aligned for one kind
    for (const std::uint32_t count : {0u, 1u, 63u, 64u, 65u, 128u, 300u}) tensors.add(dtype, kind, count, seed++);
  }
  for (const Kind kind : {Kind::spread, Kind::mostly_zero, Kind::rare, Kind::huge, Kind::tiny}) {
    for (const std::uint32_t count : {330u, 130u}) tensors.add(dtype, kind, count, seed++);
  }
  for (const std::uint32_t count : {4095u, 4096u, 4097u}) tensors.add(dtype, Kind::special, count, seed++);
  tensors.add(dtype, Kind::wide, 4097, seed++);
  tensors.add(dtype, Kind::rare, 4161, seed++);
  tensors.add(dtype, Kind::wide, 4161, seed++);
  tensors.add(dtype, Kind::all_nonfinite, 4200, seed++);
  return tensors;
}

Tensors large_tensors(DType dtype) {
  Tensors tensors;
  std::uint64_t seed = 100;
  tensors.add(dtype, Kind::spread, kChunkElements, seed++);
  tensors.add(dtype, Kind::mostly_zero, 4096 * 9 + 65, seed++);
  tensors.add(dtype, Kind::wide, kChunkElements, seed++);
  tensors.add(dtype, Kind::special, kChunkElements - 1, seed++);
  tensors.add(dtype, Kind::rare, kChunkElements, seed++);
  tensors.add(dtype, Kind::wide, 4096 * 7 + 64, seed++);
  return tensors;
}

struct NamedFactors {
  std::string name;
  ScaleFactors factors;
};

std::vector<NamedFactors> all_factors() {
  std::vector<NamedFactors> all;
  const auto add = [&](std::string name, auto change) {
    ScaleFactors factors;
    change(factors);
    all.push_back({std::move(name), factors});
  };
  const auto step = [](ScaleFactors& f, int i, ScaleStep kind, double number) {
    f.steps[i] = kind;
    f.numbers[i] = static_cast<double>(static_cast<float>(number));
  };
  add("none", [](ScaleFactors&) {});
  add("divide", [&](ScaleFactors& f) { step(f, 0, ScaleStep::divide, 1234.567); });
  add("divide by a power of two", [&](ScaleFactors& f) { step(f, 0, ScaleStep::divide, 8.0); });
  add("divide by a power of two without reciprocal", [&](ScaleFactors& f) { step(f, 0, ScaleStep::divide, 0x1p127); });
  add("divide twice", [&](ScaleFactors& f) {
    step(f, 0, ScaleStep::divide, 0.3);
    step(f, 1, ScaleStep::divide, 7.1);
  });
  add("multiply", [&](ScaleFactors& f) { step(f, 0, ScaleStep::multiply, 1.0 / 3.0); });
  add("multiply to overflow", [&](ScaleFactors& f) { step(f, 1, ScaleStep::multiply, 1e30); });
  add("clip", [](ScaleFactors& f) {
    f.clip = ClipStep::in_gradient_precision;
    f.coefficient = static_cast<double>(0.123456F);
  });
  add("clip by 0", [](ScaleFactors& f) {
    f.clip = ClipStep::in_gradient_precision;
    f.coefficient = 0.0;
  });
  add("clip by NaN", [](ScaleFactors& f) {
    f.clip = ClipStep::in_gradient_precision;
    f.coefficient = std::numeric_limits<double>::quiet_NaN();
  });
  add("0-dim clip", [](ScaleFactors& f) {
    f.clip = ClipStep::in_float64;
    f.coefficient = 0.12345678901234567;
  });
  add("zero_nonfinite", [](ScaleFactors& f) { f.zero_nonfinite = true; });
  add("everything", [&](ScaleFactors& f) {
    step(f, 0, ScaleStep::divide, 0.001);
    step(f, 1, ScaleStep::multiply, 3.3);
    f.zero_nonfinite = true;
    f.clip = ClipStep::in_gradient_precision;
    f.coefficient = static_cast<double>(0.7F);
    f.scale_inv = 1e-3F;
  });
  add("scale_inv", [](ScaleFactors& f) { f.scale_inv = 0.0123F; });
  add("scale_inv to 0 and infinity", [](ScaleFactors& f) { f.scale_inv = 1e-43F; });
  return all;
}

/// More than a device works on at once.
constexpr std::size_t kManyChunks = kMustRun ? 300 : 5000;

/// Short chunks of all types in turn.
Tensors mixed_tensors(std::size_t chunks, std::uint64_t seed) {
  constexpr Kind kinds[] = {Kind::spread, Kind::special, Kind::wide, Kind::rare, Kind::mostly_zero};
  Tensors tensors;
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < chunks; ++i) {
    const std::uint32_t count = static_cast<std::uint32_t>(random() % 150);
    tensors.add(kTypes[i % std::size(kTypes)], kinds[i % std::size(kinds)], count, random());
  }
  return tensors;
}

/// Gives neighbouring chunks different factors.
std::vector<ScaleFactors> give_factors(Tensors& tensors) {
  std::vector<ScaleFactors> factors;
  for (const NamedFactors& named : all_factors()) factors.push_back(named.factors);
  for (std::size_t i = 0; i < tensors.chunks.size(); ++i) {
    tensors.chunks[i].factors = static_cast<std::uint32_t>(i % factors.size());
  }
  return factors;
}

// ---------------------------------------------------------------------------------------------------------------------
// Comparison
// ---------------------------------------------------------------------------------------------------------------------

/// Tensors where a backend works: the same bytes at the same offsets.
class Placed {
 public:
  Placed(Backend& backend, const Tensors& tensors)
      : backend_(backend), chunks_(tensors.chunks), offset_of_(tensors.offsets()) {
    buffer_ = backend.allocate(tensors.bytes.size(), backend.describe().working_space);
    for (std::size_t i = 0; i < chunks_.size(); ++i) chunks_[i].data = buffer_.data() + offset_of_[i];
    backend.move(host(tensors.bytes), buffer_.bytes());
  }

  [[nodiscard]] const std::vector<Chunk>& chunks() const { return chunks_; }
  [[nodiscard]] std::vector<std::byte> bytes() const {
    std::vector<std::byte> bytes(buffer_.size());
    backend_.move(buffer_.bytes(), host(bytes));
    return bytes;
  }

 private:
  static Bytes host(const std::vector<std::byte>& bytes) {
    return {const_cast<std::byte*>(bytes.data()), bytes.size(), MemorySpace::host};
  }

  Backend& backend_;
  std::vector<Chunk> chunks_;
  std::vector<std::size_t> offset_of_;
  Buffer buffer_;
};

/// What a function writes into `count` values in the working space.
template <typename T, typename Function>
std::vector<T> results_of(Backend& backend, std::size_t count, const Function& function) {
  std::vector<T> results(count);
  const Buffer buffer = backend.allocate(count * sizeof(T), backend.describe().working_space);
  function(buffer.bytes());
  backend.move(buffer.bytes(), {reinterpret_cast<std::byte*>(results.data()), count * sizeof(T), MemorySpace::host});
  return results;
}

std::vector<ChunkStatistics> statistics(Backend& backend, const std::vector<Chunk>& chunks,
                                        std::span<const ScaleFactors> factors, const StatisticsRequest& request) {
  return results_of<ChunkStatistics>(backend, chunks.size(), [&](Bytes out) {
    backend.statistics({chunks, factors}, request, out);
  });
}

std::vector<ChunkStatistics> statistics(Backend& backend, const Tensors& tensors, const ScaleFactors& factors,
                                        const StatisticsRequest& request) {
  return statistics(backend, Placed(backend, tensors).chunks(), {&factors, 1}, request);
}

std::vector<std::byte> scaled(Backend& backend, const Tensors& tensors, std::span<const ScaleFactors> factors) {
  const Placed placed(backend, tensors);
  backend.scale({placed.chunks(), factors});
  return placed.bytes();
}

std::string text(const ChunkStatistics& s) {
  char buffer[400];
  std::snprintf(buffer, sizeof buffer, "power %a sum %a max %a min %a k %d zeros %u sub %u nan %u inf %u %u first %u",
                s.power_sum, s.signed_sum, s.max_abs, s.min_abs, s.exponent, s.zeros, s.subnormals, s.nan, s.posinf,
                s.neginf, s.first_nonfinite);
  return buffer;
}

void expect_same(const std::vector<ChunkStatistics>& expected, std::span<const ChunkStatistics> actual,
                 const std::string& of) {
  ASSERT_EQ(expected.size(), actual.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(std::memcmp(&expected[i], &actual[i], sizeof expected[i]), 0)
        << of << ", chunk " << i << "\nexpected " << text(expected[i]) << "\nactual   " << text(actual[i]);
  }
}

/// @return whether there is a backend to test
bool found(const std::unique_ptr<Backend>& backend, const char* name) {
  EXPECT_FALSE(backend == nullptr && kMustRun) << "no " << name;
  return backend != nullptr;
}

class BackendAgreement : public testing::TestWithParam<std::tuple<const char*, DType>> {
 protected:
  void SetUp() override {
    const char* const name = std::get<0>(GetParam());
    backend_ = make(name);
    if (!found(backend_, name)) GTEST_SKIP() << "this machine cannot run " << name;
  }

  void expect_same_statistics(const Tensors& tensors, const NamedFactors& named, const StatisticsRequest& request) {
    reference::ReferenceBackend by_hand;
    expect_same(statistics(by_hand, tensors, named.factors, request),
                statistics(*backend_, tensors, named.factors, request),
                named.name + ", p = " + std::to_string(request.order.p));
  }

  DType dtype_ = std::get<1>(GetParam());
  std::unique_ptr<Backend> backend_;
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST_P(BackendAgreement, StatisticsForEveryNormAndFactor) {
  const Tensors tensors = small_tensors(dtype_);
  const std::vector<NamedFactors> factors = all_factors();
  for (std::size_t i = 0; i < factors.size(); ++i) {
    expect_same_statistics(tensors, factors[i], {.order = {2.0}});
    // Scaling does not look at p: where blocks are expensive, some pairs are enough.
    if (kMustRun && i % 4 != 0) continue;
    for (const double p : {1.0, 3.0, 4.0, kInfinity, 2.5}) expect_same_statistics(tensors, factors[i], {.order = {p}});
  }
}

TEST_P(BackendAgreement, StatisticsOfWholeChunks) {
  const Tensors tensors = large_tensors(dtype_);
  const std::vector<NamedFactors> factors = all_factors();
  for (const double p : {1.0, 2.0, 3.0, 4.0, kInfinity}) expect_same_statistics(tensors, factors[0], {.order = {p}});
  expect_same_statistics(tensors, factors[0], {.order = {0.5}});
  expect_same_statistics(tensors, factors[4], {.order = {2.0}});
  expect_same_statistics(tensors, factors[7], {.order = {2.0}});
}

TEST_P(BackendAgreement, ReferenceTerms) {
  const Tensors tensors = small_tensors(dtype_);
  NamedFactors named{"normalizer", {}};
  named.factors.normalizer = static_cast<double>(3.7F);
  for (const bool unrounded : {false, true}) {
    named.factors.reference_in_float64 = unrounded;
    for (const double p : {1.0, 2.0, 3.0, 4.0, kInfinity, 2.5}) {
      expect_same_statistics(tensors, named, {.order = {p}, .terms = TermArithmetic::reference});
    }
  }
}

TEST_P(BackendAgreement, StatisticsLeaveTheBytes) {
  const Tensors before = small_tensors(dtype_);
  const Placed after(*backend_, before);
  for (const NamedFactors& named : all_factors()) {
    (void)statistics(*backend_, after.chunks(), {&named.factors, 1}, {});
  }
  EXPECT_EQ(before.bytes, after.bytes());
}

TEST_P(BackendAgreement, Scale) {
  Tensors tensors = small_tensors(dtype_);
  tensors.add(dtype_, Kind::wide, 20001, 77);
  tensors.add(dtype_, Kind::special, kChunkElements, 78);
  for (const NamedFactors& named : all_factors()) {
    reference::ReferenceBackend by_hand;
    EXPECT_EQ(scaled(by_hand, tensors, {&named.factors, 1}), scaled(*backend_, tensors, {&named.factors, 1}))
        << named.name;
  }
}

TEST_P(BackendAgreement, EveryElementOfNarrowTypesScales) {
  if (size_of(dtype_) > 2) GTEST_SKIP() << "too many elements";
  Tensors all;
  all.add(dtype_, Kind::wide, 1u << (8 * size_of(dtype_)), 1);
  for (std::size_t i = 0; i < all.chunks[0].count; ++i) reference::store(dtype_, all.chunks[0].data, i, i);
  for (const NamedFactors& named : all_factors()) {
    reference::ReferenceBackend by_hand;
    EXPECT_EQ(scaled(by_hand, all, {&named.factors, 1}), scaled(*backend_, all, {&named.factors, 1})) << named.name;
    expect_same_statistics(all, named, {});
  }
}

/// As bytes, so that NaN is equal to itself.
/// @param factors  of each rank
std::vector<std::byte> combined(Backend& backend, const std::vector<Tensors>& ranks,
                                const std::vector<std::vector<ScaleFactors>>& factors, PartialOperation operation) {
  std::vector<Placed> placed;
  std::vector<ChunkTable> tables;
  std::size_t elements = 0;
  placed.reserve(ranks.size());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    placed.emplace_back(backend, ranks[rank]);
    tables.push_back({placed.back().chunks(), factors[rank]});
  }
  for (const Chunk& chunk : ranks[0].chunks) elements += chunk.count;
  return results_of<std::byte>(backend, elements * sizeof(double), [&](Bytes out) {
    backend.combine(tables, operation, static_cast<double>(ranks.size()), out);
  });
}

TEST_P(BackendAgreement, Combine) {
  for (const NamedFactors& named : all_factors()) {
    std::vector<Tensors> ranks(3);
    for (std::uint64_t rank = 0; rank < ranks.size(); ++rank) {
      for (const std::uint32_t count : {1u, 0u, 130u, 5000u}) {
        ranks[rank].add(dtype_, rank == 1 ? Kind::special : Kind::wide, count, 10 * rank + count);
      }
    }
    for (const auto operation : {PartialOperation::sum, PartialOperation::avg, PartialOperation::max,
                                 PartialOperation::min, PartialOperation::product}) {
      const std::vector<std::vector<ScaleFactors>> factors(ranks.size(), {named.factors});
      reference::ReferenceBackend by_hand;
      EXPECT_EQ(combined(by_hand, ranks, factors, operation), combined(*backend_, ranks, factors, operation))
          << named.name << ", operation " << static_cast<int>(operation);
    }
  }
}

std::vector<std::byte> accumulated(Backend& backend, const Tensors& into, const Tensors& from,
                                   std::span<const ScaleFactors> factors, AccumulateStep step) {
  const Placed target(backend, into), source(backend, from);
  backend.accumulate(target.chunks(), {source.chunks(), factors}, step);
  return target.bytes();
}

TEST_P(BackendAgreement, Accumulate) {
  ScaleFactors factors;
  factors.scale_inv = 0.0123F;
  for (const DType from_type : kTypes) {
    Tensors into(1), from(2);  // both aligned, either, none
    std::uint64_t seed = 0;
    for (const Kind kind : {Kind::special, Kind::wide}) {
      for (const std::uint32_t count : {5000u, 4999u, 1029u, 1030u, 0u, 17u, 1u, 18u}) {
        into.add(dtype_, kind, count, ++seed);
        from.add(from_type, kind, count, ++seed);
      }
    }
    for (const AccumulateStep step : {AccumulateStep::assign, AccumulateStep::add}) {
      reference::ReferenceBackend by_hand;
      EXPECT_EQ(accumulated(by_hand, into, from, {&factors, 1}, step),
                accumulated(*backend_, into, from, {&factors, 1}, step))
          << name(from_type) << ", step " << static_cast<int>(step);
    }
  }
}

TEST_P(BackendAgreement, SeveralFactorsInOneTable) {
  Tensors tensors = small_tensors(dtype_);
  const std::vector<ScaleFactors> factors = give_factors(tensors);
  reference::ReferenceBackend by_hand;
  expect_same(statistics(by_hand, Placed(by_hand, tensors).chunks(), factors, {}),
              statistics(*backend_, Placed(*backend_, tensors).chunks(), factors, {}), "several factors");
}

/// Little enough for the sanitizers that slow threads down most.
TEST_P(BackendAgreement, EachFunctionOnce) {
  Tensors tensors;
  tensors.add(dtype_, Kind::rare, 4096 + 130, 21);
  tensors.add(dtype_, Kind::special, 8192 + 130, 22);  // threads of several warps have something to count
  NamedFactors divided{"divided", {}};
  divided.factors.steps[0] = ScaleStep::divide;
  divided.factors.numbers[0] = 3.0;
  for (const double p : {2.0, 3.0, 2.5}) {
    expect_same_statistics(tensors, p == 2.0 ? divided : NamedFactors{}, {.order = {p}});
  }
  reference::ReferenceBackend by_hand;
  EXPECT_EQ(scaled(by_hand, tensors, {&divided.factors, 1}), scaled(*backend_, tensors, {&divided.factors, 1}));
  EXPECT_EQ(combined(by_hand, {tensors, tensors}, {{divided.factors}, {{}}}, PartialOperation::max),
            combined(*backend_, {tensors, tensors}, {{divided.factors}, {{}}}, PartialOperation::max));
  EXPECT_EQ(accumulated(by_hand, tensors, tensors, {&divided.factors, 1}, AccumulateStep::add),
            accumulated(*backend_, tensors, tensors, {&divided.factors, 1}, AccumulateStep::add));
}

/// Data on which another order gives other bits: else the tests above would prove little about the order.
TEST_P(BackendAgreement, TheOrderMatters) {
  const Tensors tensors = large_tensors(dtype_);
  const ChunkStatistics lanes = statistics(*backend_, tensors, ScaleFactors{}, {.order = {3.0}})[0];
  double straight = 0.0;
  for (std::size_t i = 0; i < tensors.chunks[0].count; ++i) {
    const double x = std::ldexp(
        std::fabs(reference::decode(dtype_, reference::load(dtype_, tensors.chunks[0].data, i))), -lanes.exponent);
    straight += x * x * x;
  }
  EXPECT_NEAR(straight / lanes.power_sum, 1.0, 1e-9);
  if (size_of(dtype_) > 1) {  // sums of float8 are exact in any order
    EXPECT_NE(straight, lanes.power_sum);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, BackendAgreement,
                         testing::Combine(testing::ValuesIn(kBackends), testing::ValuesIn(kTypes)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)) + "_" +
                                  std::string(name(std::get<1>(test.param)));
                         });

// ---------------------------------------------------------------------------------------------------------------------
// Tables of all types, calls that wait for nothing
// ---------------------------------------------------------------------------------------------------------------------

class BackendTables : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    backend_ = make(GetParam());
    if (!found(backend_, GetParam())) GTEST_SKIP() << "this machine cannot run " << GetParam();
  }

  /// Memory that the test itself may read after wait().
  [[nodiscard]] Buffer pinned(std::size_t bytes) const { return backend_->allocate(bytes, MemorySpace::pinned); }
  [[nodiscard]] Buffer working(std::size_t bytes) const {
    return backend_->allocate(bytes, backend_->describe().working_space);
  }

  std::unique_ptr<Backend> backend_;
  reference::ReferenceBackend by_hand_;
};

std::vector<std::byte> bytes_in(const Buffer& buffer) {
  return {buffer.data(), buffer.data() + buffer.size()};
}

std::span<const ChunkStatistics> statistics_in(const Buffer& buffer) {
  return {reinterpret_cast<const ChunkStatistics*>(buffer.data()), buffer.size() / sizeof(ChunkStatistics)};
}

std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST_P(BackendTables, StatisticsOfAllTypes) {
  Tensors tensors = mixed_tensors(kManyChunks, 1);
  const std::vector<ScaleFactors> factors = give_factors(tensors);
  for (const double p : {2.0, kInfinity}) {
    expect_same(statistics(by_hand_, Placed(by_hand_, tensors).chunks(), factors, {.order = {p}}),
                statistics(*backend_, Placed(*backend_, tensors).chunks(), factors, {.order = {p}}),
                "p = " + std::to_string(p));
  }
}

TEST_P(BackendTables, ScaleAllTypes) {
  Tensors tensors = mixed_tensors(kManyChunks, 2);
  const std::vector<ScaleFactors> factors = give_factors(tensors);
  EXPECT_EQ(scaled(by_hand_, tensors, factors), scaled(*backend_, tensors, factors));
}

TEST_P(BackendTables, CombineAllTypes) {
  std::vector<Tensors> ranks(3, mixed_tensors(kManyChunks, 3));
  std::vector<std::vector<ScaleFactors>> factors;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    factors.push_back(give_factors(ranks[rank]));
    std::rotate(factors[rank].begin(), factors[rank].begin() + static_cast<std::ptrdiff_t>(rank), factors[rank].end());
    for (Chunk& chunk : ranks[rank].chunks) {
      chunk.factors = static_cast<std::uint32_t>((chunk.factors + 3 * rank) % factors[rank].size());
    }
  }
  EXPECT_EQ(combined(by_hand_, ranks, factors, PartialOperation::sum),
            combined(*backend_, ranks, factors, PartialOperation::sum));
}

TEST_P(BackendTables, AccumulateAllTypesIntoAllTypes) {
  Tensors into(1), from(2);
  std::uint64_t seed = 0;
  for (std::size_t i = 0; i < kManyChunks; ++i) {
    const std::uint32_t count = static_cast<std::uint32_t>(i * 37 % 100);
    into.add(kTypes[i % std::size(kTypes)], Kind::spread, count, ++seed);
    from.add(kTypes[i / std::size(kTypes) % std::size(kTypes)], Kind::special, count, ++seed);
  }
  const std::vector<ScaleFactors> factors = give_factors(from);
  EXPECT_EQ(accumulated(by_hand_, into, from, factors, AccumulateStep::add),
            accumulated(*backend_, into, from, factors, AccumulateStep::add));
}

TEST_P(BackendTables, SpansMayBeReusedWhenACallReturns) {
  constexpr std::size_t kCalls = 11;  // more than the tables that a backend may have on their way
  Tensors tensors;
  for (std::uint64_t seed = 0; seed < kCalls + 6; ++seed) tensors.add(DType::float32, Kind::spread, 200, seed);
  const std::vector<NamedFactors> named = all_factors();
  const Placed placed(*backend_, tensors), expected_placed(by_hand_, tensors);
  std::vector<std::vector<ChunkStatistics>> expected;
  std::vector<Buffer> results, in_working_space;
  std::vector<Chunk> chunks;
  std::vector<ScaleFactors> factors;
  for (std::size_t call = 0; call < kCalls; ++call) {
    const std::size_t count = tensors.chunks.size() - call;  // the first is the longest: no table needs more memory
    const auto first_chunks = [&](const Placed& of) {
      return std::vector<Chunk>(of.chunks().begin(), of.chunks().begin() + static_cast<std::ptrdiff_t>(count));
    };
    factors.assign(1, named[call].factors);
    expected.push_back(statistics(by_hand_, first_chunks(expected_placed), factors, {}));
    in_working_space.push_back(working(count * sizeof(ChunkStatistics)));
    results.push_back(pinned(count * sizeof(ChunkStatistics)));
    chunks = first_chunks(placed);
    backend_->statistics({chunks, factors}, {}, in_working_space.back().bytes());
    std::fill(chunks.begin(), chunks.end(), Chunk{nullptr, kChunkElements, DType::float64, 0});
    factors[0] = {.numbers = {0.0, 0.0}, .steps = {ScaleStep::multiply, ScaleStep::multiply}};
  }
  for (std::size_t call = 0; call < kCalls; ++call) {
    backend_->move(in_working_space[call].bytes(), results[call].bytes());
  }
  backend_->wait(UnusedMemory::keep);
  for (std::size_t call = 0; call < kCalls; ++call) {
    expect_same(expected[call], statistics_in(results[call]), named[call].name);
  }
}

TEST_P(BackendTables, CallsTakeEffectInOrder) {
  Tensors tensors = mixed_tensors(12, 5);
  const std::vector<ScaleFactors> factors = give_factors(tensors);
  const std::size_t bytes = tensors.chunks.size() * sizeof(ChunkStatistics);
  const auto before = statistics(by_hand_, Placed(by_hand_, tensors).chunks(), {factors}, {});
  const Placed expected(by_hand_, tensors);
  by_hand_.scale({expected.chunks(), factors});
  const auto after = statistics(by_hand_, expected.chunks(), {factors}, {});

  const Buffer from = pinned(tensors.bytes.size()), to = pinned(tensors.bytes.size());
  const Buffer statistics_before = pinned(bytes), statistics_after = pinned(bytes);
  std::copy(tensors.bytes.begin(), tensors.bytes.end(), from.data());
  {
    const Buffer data = working(tensors.bytes.size()), other = working(tensors.bytes.size()), out = working(bytes);
    for (std::size_t i = 0; i < tensors.chunks.size(); ++i) {
      tensors.chunks[i].data = data.data() + tensors.offsets()[i];
    }
    backend_->move(from.bytes(), other.bytes());
    backend_->move(other.bytes(), data.bytes());
    backend_->statistics({tensors.chunks, factors}, {}, out.bytes());
    backend_->move(out.bytes(), statistics_before.bytes());
    backend_->scale({tensors.chunks, factors});
    backend_->statistics({tensors.chunks, factors}, {}, out.bytes());
    backend_->move(out.bytes(), statistics_after.bytes());
    backend_->move(data.bytes(), to.bytes());
  }  // released before anything is known to have happened
  const Buffer next = working(tensors.bytes.size() + bytes);
  const Buffer noise = pinned(next.size());
  std::fill_n(noise.data(), noise.size(), std::byte{0x55});
  backend_->move(noise.bytes(), next.bytes());
  backend_->wait(UnusedMemory::release);
  expect_same(before, statistics_in(statistics_before), "before");
  expect_same(after, statistics_in(statistics_after), "after");
  EXPECT_EQ(expected.bytes(), bytes_in(to));
}

TEST_P(BackendTables, MovesBetweenAllSpaces) {
  constexpr std::size_t kBytes = 70001;
  const std::vector<std::byte> first = random_bytes(kBytes, 6), second = random_bytes(kBytes, 7);
  const Buffer a = pinned(kBytes), b = working(kBytes), c = working(kBytes), d = pinned(kBytes), e = pinned(kBytes);
  const Buffer host = backend_->allocate(kBytes, MemorySpace::host);
  const auto fill = [](const Buffer& buffer, const std::vector<std::byte>& bytes) {
    std::copy(bytes.begin(), bytes.end(), buffer.data());
  };

  fill(a, first);
  backend_->move(a.bytes(), b.bytes());
  backend_->move(b.bytes(), c.bytes());
  backend_->move(c.bytes(), d.bytes());
  backend_->wait(UnusedMemory::keep);
  EXPECT_EQ(bytes_in(d), first);

  // Pinned memory that is still on its way out keeps its bytes, one on its way in has them.
  fill(host, second);
  backend_->move(a.bytes(), b.bytes());
  backend_->move(host.bytes(), a.bytes());
  backend_->move(b.bytes(), host.bytes());
  EXPECT_EQ(bytes_in(host), first);
  EXPECT_EQ(bytes_in(a), second);
  backend_->move(a.bytes(), c.bytes());
  backend_->move(c.bytes(), d.bytes());
  backend_->move(d.bytes(), host.bytes());
  EXPECT_EQ(bytes_in(host), second);
  backend_->move(b.bytes(), d.bytes());
  backend_->move(d.bytes(), e.bytes());
  backend_->wait(UnusedMemory::keep);
  EXPECT_EQ(bytes_in(e), first);

  backend_->move(a.bytes().subspan(1, 1000), b.bytes().subspan(30, 1000));
  backend_->move(b.bytes().subspan(0, 0), c.bytes().subspan(0, 0));
  backend_->move(b.bytes(), d.bytes());
  backend_->wait(UnusedMemory::keep);
  std::vector<std::byte> expected = first;
  std::copy_n(second.begin() + 1, 1000, expected.begin() + 30);
  EXPECT_EQ(bytes_in(d), expected);
}

TEST_P(BackendTables, MovesFromAndToHostMemoryAreSeenByOtherThreads) {
  const std::vector<std::byte> bytes = random_bytes(5000, 8);
  const Buffer there = working(bytes.size()), back = pinned(bytes.size());
  backend_->move({const_cast<std::byte*>(bytes.data()), bytes.size(), MemorySpace::host}, there.bytes());
  std::thread([&] {
    backend_->move(there.bytes(), back.bytes());
    backend_->wait(UnusedMemory::keep);
  }).join();
  EXPECT_EQ(bytes_in(back), bytes);
}

TEST_P(BackendTables, SeveralThreadsAtOnce) {
  struct Work {
    Tensors tensors;
    std::vector<ScaleFactors> factors;
    std::vector<std::byte> expected_bytes, bytes;
    std::vector<ChunkStatistics> expected, actual;
  };
  constexpr int kRounds = kMustRun ? 2 : 20;
  std::vector<Work> works;
  for (std::uint64_t thread = 0; thread < 3; ++thread) {
    Work& work = works.emplace_back(Work{mixed_tensors(kMustRun ? 6 : 300, 9 + thread), {}, {}, {}, {}, {}});
    work.factors = give_factors(work.tensors);
    std::rotate(work.factors.begin(), work.factors.begin() + static_cast<std::ptrdiff_t>(thread), work.factors.end());
    work.expected_bytes = scaled(by_hand_, work.tensors, work.factors);
    work.expected = statistics(by_hand_, Placed(by_hand_, work.tensors).chunks(), work.factors, {});
  }
  std::vector<std::thread> threads;
  for (Work& work : works) {
    threads.emplace_back([&backend = *backend_, &work] {
      for (int round = 0; round < kRounds; ++round) {
        work.actual = statistics(backend, Placed(backend, work.tensors).chunks(), work.factors, {});
        work.bytes = scaled(backend, work.tensors, work.factors);
        if (work.bytes != work.expected_bytes) return;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Work& work : works) {
    expect_same(work.expected, work.actual, "of one thread");
    EXPECT_EQ(work.expected_bytes, work.bytes);
  }
}

/// Calls with little between them, on a backend that has seen none of the threads.
TEST_P(BackendTables, ThreadsBeginTogether) {
  constexpr int kRounds = 40, kThreads = 4, kCalls = 2;
  for (int round = 0; round < kRounds; ++round) {
    const std::unique_ptr<Backend> backend = make(GetParam());
    std::atomic<int> missing = kThreads;
    std::vector<std::vector<std::byte>> bytes;
    for (std::uint64_t thread = 0; thread < kThreads; ++thread) bytes.push_back(random_bytes(100, thread));
    const std::vector<std::vector<std::byte>> expected = bytes;
    std::vector<std::thread> threads;
    for (std::vector<std::byte>& mine : bytes) {
      threads.emplace_back([&] {
        missing.fetch_sub(1, std::memory_order_relaxed);
        while (missing.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
        const Buffer there = backend->allocate(mine.size(), backend->describe().working_space);
        const Bytes here{mine.data(), mine.size(), MemorySpace::host};
        const Buffer zeros = backend->allocate(sizeof(double), backend->describe().working_space);
        double zero = 0.0;
        backend->move({reinterpret_cast<std::byte*>(&zero), sizeof zero, MemorySpace::host}, zeros.bytes());
        ScaleFactors factors;
        factors.clip = ClipStep::in_gradient_precision;
        const Chunk chunk{zeros.data(), 1, DType::float64, 0};
        backend->move(here, there.bytes());
        for (int call = 0; call < kCalls; ++call) backend->scale({{&chunk, 1}, {&factors, 1}});
        std::fill(mine.begin(), mine.end(), std::byte{0});
        backend->move(there.bytes(), here);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(bytes, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, BackendTables, testing::ValuesIn(kBackends),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace gradclip
