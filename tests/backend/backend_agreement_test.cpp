// Every backend against the reference, bit for bit.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/backend/cpu/cpu_backend.hpp"
#include "gradclip/backend/reduction.hpp"
#include "reference_backend.hpp"

namespace gradclip {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Backends
// ---------------------------------------------------------------------------------------------------------------------

constexpr DType kTypes[] = {DType::float64,  DType::float32,       DType::float16,
                            DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2};

/// A backend by its name here; empty where this machine cannot run it.
std::unique_ptr<Backend> make(const std::string& name) {
  for (const cpu::Kernels* kernels : cpu::supported_kernels()) {
    if (name == "cpu_" + std::string(kernels->name)) return std::make_unique<CpuBackend>(*kernels);
  }
  return nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// Data
// ---------------------------------------------------------------------------------------------------------------------

enum class Kind { wide, spread, special, all_nonfinite, mostly_zero };

/// Bits of one element. `wide` draws from all finite magnitudes alike; `spread` from so many exponents that most
/// elements still touch the last bits of a sum in float64: every order of such a sum has other bits.
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
  switch (kind) {
    case Kind::wide:
      return wide();
    case Kind::spread:
      return spread();
    case Kind::all_nonfinite:
      return nonfinite_bits();
    case Kind::mostly_zero:
      return random() % 8 != 0 ? sign : spread();
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

/// Chunks of one type in one allocation of its own, each beginning at an odd place for its vectors.
struct Tensors {
  std::vector<std::byte> bytes;
  std::vector<Chunk> chunks;

  void add(DType dtype, Kind kind, std::uint32_t count, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const std::size_t offset = bytes.size() + (chunks.size() % 7) * size_of(dtype);
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
  Tensors() = default;
  Tensors(const Tensors& other) : bytes(other.bytes), chunks(other.chunks), offsets_(other.offsets_) { point(); }
  Tensors& operator=(const Tensors&) = delete;
  ~Tensors() = default;

 private:
  std::vector<std::size_t> offsets_;
};

Tensors small_tensors(DType dtype) {
  Tensors tensors;
  std::uint64_t seed = 1;
  for (const Kind kind : {Kind::wide, Kind::spread, Kind::special, Kind::mostly_zero}) {
    for (const std::uint32_t count : {0u, 1u, 63u, 64u, 65u, 300u}) tensors.add(dtype, kind, count, seed++);
  }
  for (const std::uint32_t count : {4095u, 4096u, 4097u}) tensors.add(dtype, Kind::special, count, seed++);
  tensors.add(dtype, Kind::wide, 4097, seed++);
  tensors.add(dtype, Kind::all_nonfinite, 4200, seed++);
  return tensors;
}

Tensors large_tensors(DType dtype) {
  Tensors tensors;
  std::uint64_t seed = 100;
  tensors.add(dtype, Kind::spread, kChunkElements, seed++);
  tensors.add(dtype, Kind::wide, kChunkElements, seed++);
  tensors.add(dtype, Kind::special, kChunkElements - 1, seed++);
  tensors.add(dtype, Kind::mostly_zero, 4096 * 9 + 65, seed++);
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

// ---------------------------------------------------------------------------------------------------------------------
// Comparison
// ---------------------------------------------------------------------------------------------------------------------

std::vector<ChunkStatistics> statistics(Backend& backend, const std::vector<Chunk>& chunks, const ScaleFactors& factors,
                                        const StatisticsRequest& request) {
  std::vector<ChunkStatistics> results(chunks.size());
  const std::size_t bytes = results.size() * sizeof(ChunkStatistics);
  backend.statistics({chunks, {&factors, 1}}, request, {reinterpret_cast<std::byte*>(results.data()), bytes, {}});
  return results;
}

std::string text(const ChunkStatistics& s) {
  char buffer[400];
  std::snprintf(buffer, sizeof buffer, "power %a sum %a max %a min %a k %d zeros %u sub %u nan %u inf %u %u first %u",
                s.power_sum, s.signed_sum, s.max_abs, s.min_abs, s.exponent, s.zeros, s.subnormals, s.nan, s.posinf,
                s.neginf, s.first_nonfinite);
  return buffer;
}

class BackendAgreement : public testing::TestWithParam<std::tuple<std::string, DType>> {
 protected:
  void SetUp() override {
    backend_ = make(std::get<0>(GetParam()));
    if (backend_ == nullptr) GTEST_SKIP() << "this processor cannot run " << std::get<0>(GetParam());
  }

  void expect_same_statistics(const Tensors& tensors, const NamedFactors& named, const StatisticsRequest& request) {
    reference::ReferenceBackend by_hand;
    const auto expected = statistics(by_hand, tensors.chunks, named.factors, request);
    const auto actual = statistics(*backend_, tensors.chunks, named.factors, request);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(std::memcmp(&expected[i], &actual[i], sizeof expected[i]), 0)
          << named.name << ", p = " << request.order.p << ", chunk " << i << " of " << tensors.chunks[i].count
          << "\nexpected " << text(expected[i]) << "\nactual   " << text(actual[i]);
    }
  }

  DType dtype_ = std::get<1>(GetParam());
  std::unique_ptr<Backend> backend_;
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST_P(BackendAgreement, StatisticsForEveryNormAndFactor) {
  const Tensors tensors = small_tensors(dtype_);
  for (const NamedFactors& named : all_factors()) {
    for (const double p : {1.0, 2.0, 3.0, 4.0, kInfinity, 2.5}) expect_same_statistics(tensors, named, {.order = {p}});
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
  const Tensors after(before);
  for (const NamedFactors& named : all_factors()) (void)statistics(*backend_, after.chunks, named.factors, {});
  EXPECT_EQ(before.bytes, after.bytes);
}

TEST_P(BackendAgreement, Scale) {
  for (const NamedFactors& named : all_factors()) {
    Tensors expected = small_tensors(dtype_);
    expected.add(dtype_, Kind::wide, 65536, 77);
    Tensors actual(expected);
    reference::ReferenceBackend by_hand;
    by_hand.scale({expected.chunks, {&named.factors, 1}});
    backend_->scale({actual.chunks, {&named.factors, 1}});
    EXPECT_EQ(expected.bytes, actual.bytes) << named.name;
  }
}

TEST_P(BackendAgreement, EveryElementOfNarrowTypesScales) {
  if (size_of(dtype_) > 2) GTEST_SKIP() << "too many elements";
  Tensors all;
  all.add(dtype_, Kind::wide, 1u << (8 * size_of(dtype_)), 1);
  for (std::size_t i = 0; i < all.chunks[0].count; ++i) reference::store(dtype_, all.chunks[0].data, i, i);
  for (const NamedFactors& named : all_factors()) {
    Tensors expected(all);
    Tensors actual(all);
    reference::ReferenceBackend by_hand;
    by_hand.scale({expected.chunks, {&named.factors, 1}});
    backend_->scale({actual.chunks, {&named.factors, 1}});
    EXPECT_EQ(expected.bytes, actual.bytes) << named.name;
    expect_same_statistics(all, named, {});
  }
}

TEST_P(BackendAgreement, Combine) {
  for (const NamedFactors& named : all_factors()) {
    std::vector<Tensors> ranks(3);
    std::vector<ChunkTable> tables;
    std::size_t elements = 0;
    for (std::uint64_t rank = 0; rank < ranks.size(); ++rank) {
      for (const std::uint32_t count : {1u, 0u, 130u, 5000u}) {
        ranks[rank].add(dtype_, rank == 1 ? Kind::special : Kind::wide, count, 10 * rank + count);
        if (rank == 0) elements += count;
      }
      tables.push_back({ranks[rank].chunks, {&named.factors, 1}});
    }
    for (const auto operation : {PartialOperation::sum, PartialOperation::avg, PartialOperation::max,
                                 PartialOperation::min, PartialOperation::product}) {
      std::vector<double> expected(elements);
      std::vector<double> actual(elements);
      reference::ReferenceBackend by_hand;
      const auto bytes = [](std::vector<double>& v) {
        return Bytes{reinterpret_cast<std::byte*>(v.data()), v.size() * sizeof(double), {}};
      };
      by_hand.combine(tables, operation, 3.0, bytes(expected));
      backend_->combine(tables, operation, 3.0, bytes(actual));
      EXPECT_EQ(std::memcmp(expected.data(), actual.data(), elements * sizeof(double)), 0)
          << named.name << ", operation " << static_cast<int>(operation);
    }
  }
}

TEST_P(BackendAgreement, SeveralFactorsInOneTable) {
  Tensors tensors = small_tensors(dtype_);
  std::vector<ScaleFactors> factors;
  for (const NamedFactors& named : all_factors()) factors.push_back(named.factors);
  for (std::size_t i = 0; i < tensors.chunks.size(); ++i) {
    tensors.chunks[i].factors = static_cast<std::uint32_t>(i % factors.size());
  }
  reference::ReferenceBackend by_hand;
  std::vector<ChunkStatistics> expected(tensors.chunks.size());
  std::vector<ChunkStatistics> actual(tensors.chunks.size());
  const std::size_t size = expected.size() * sizeof expected[0];
  by_hand.statistics({tensors.chunks, factors}, {}, {reinterpret_cast<std::byte*>(expected.data()), size, {}});
  backend_->statistics({tensors.chunks, factors}, {}, {reinterpret_cast<std::byte*>(actual.data()), size, {}});
  EXPECT_EQ(std::memcmp(expected.data(), actual.data(), size), 0);
}

/// Data on which another order gives other bits: else the tests above would prove little about the order.
TEST_P(BackendAgreement, TheOrderMatters) {
  const Tensors tensors = large_tensors(dtype_);
  const ChunkStatistics lanes = statistics(*backend_, {tensors.chunks[0]}, {}, {.order = {3.0}})[0];
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
                         testing::Combine(testing::Values("cpu_baseline", "cpu_avx2", "cpu_avx512"),
                                          testing::ValuesIn(kTypes)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" + std::string(name(std::get<1>(test.param)));
                         });

}  // namespace
}  // namespace gradclip
