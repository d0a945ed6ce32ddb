// Scaling, combining and accumulating: one block works on one chunk, each element by itself, through the element
// functions that a CPU calls.

#include "gradclip/backend/cuda/kernels.hpp"
#include "gradclip/backend/cuda/vectors.hpp"
#include "gradclip/backend/term.hpp"
#include "gradclip/base/dispatch.hpp"
#include "gradclip/cuda_runtime/launch.hpp"

namespace gradclip::cuda {
namespace {

constexpr unsigned kElementwiseThreads = 256;

/// Calls vectors(i) for the multiples of kCount in [begin, begin + whole × kCount) and elements(i) for the rest of
/// [0, count), each by one thread of the block.
template <int kCount, int kUnrolled, typename Vectors, typename Elements>
__device__ __forceinline__ void share_out(int count, int begin, int whole, const Vectors& vectors,
                                          const Elements& elements) {
  const int threads = static_cast<int>(kElementwiseThreads);
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll kUnrolled
  for (int vector = thread; vector < whole; vector += threads) vectors(begin + vector * kCount);
  const int rest = count - whole * kCount;
#pragma unroll 1
  for (int i = thread; i < rest; i += threads) elements(i < begin ? i : i + whole * kCount);
}

/// Elements before the first that is aligned to a vector, at most `count`.
template <typename Bits>
__device__ int head_of(const Bits* data, int count) {
  const auto past = static_cast<int>(reinterpret_cast<std::uintptr_t>(data) % kVectorBytes);
  const int head = past == 0 ? 0 : (kVectorBytes - past) / static_cast<int>(sizeof(Bits));
  return head < count ? head : count;
}

template <DType D>
__global__ void __launch_bounds__(kElementwiseThreads, kAnyOccupancy) scale_kernel(DeviceTable table) {
  constexpr int kCount = kVectorBytes / static_cast<int>(sizeof(BitsOf<D>));
  constexpr int kUnrolled = kCount < 8 ? 8 / kCount : 1;
  const DeviceChunk chunk = table.chunks[blockIdx.x];
  const ScaleFactors factors = table.factors[chunk.factors];
  BitsOf<D>* data = global(reinterpret_cast<BitsOf<D>*>(chunk.data));
  const int count = static_cast<int>(chunk.count);
  const int head = head_of(data, count);
  share_out<kCount, kUnrolled>(
      count, head, (count - head) / kCount,
      [&](int i) {
        auto vector = load_vector<BitsOf<D>, kCount>(data + i);
        scale_elements<D>(vector.element, factors);
        store_vector(data + i, vector);
      },
      [&](int i) { *global(data + i) = scale_element<D>(load_element(data + i), factors); });
}

/// A thread takes single elements: their sums are 8 bytes wide, so neighbours write whole sectors together.
template <DType D>
__global__ void __launch_bounds__(kElementwiseThreads, kAnyOccupancy) combine_kernel(CombineTable table) {
  const DeviceChunk* addends = table.addends.chunks + static_cast<std::size_t>(blockIdx.x) * table.ranks;
  double* out = global(table.out[blockIdx.x]);
  const unsigned count = addends[0].count;
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < count; i += kElementwiseThreads) {
    double combined = 0.0;
#pragma unroll 1
    for (unsigned rank = 0; rank < table.ranks; ++rank) {
      const ScaleFactors& factors = table.addends.factors[addends[rank].factors];
      const BitsOf<D> bits = load_element(reinterpret_cast<const BitsOf<D>*>(addends[rank].data) + i);
      const double value = static_cast<double>(element_value<D>(scale_element<D>(bits, factors), factors.scale_inv));
      combined = rank == 0 ? value : combine_values(table.operation, combined, value);
    }
    out[i] = finish_combination(table.operation, combined, table.divisor);
  }
}

template <DType Into, DType From>
__global__ void __launch_bounds__(kElementwiseThreads, kAnyOccupancy)
    accumulate_kernel(std::byte* const* into_of, DeviceTable table, bool add) {
  using IntoBits = BitsOf<Into>;
  using FromBits = BitsOf<From>;
  constexpr int kWider = static_cast<int>(sizeof(IntoBits) > sizeof(FromBits) ? sizeof(IntoBits) : sizeof(FromBits));
  constexpr int kCount = kVectorBytes / kWider;
  const DeviceChunk chunk = table.chunks[blockIdx.x];
  const float scale_inv = table.factors[chunk.factors].scale_inv;
  IntoBits* into = global(reinterpret_cast<IntoBits*>(into_of[blockIdx.x]));
  const FromBits* from = global(reinterpret_cast<const FromBits*>(chunk.data));
  const int count = static_cast<int>(chunk.count);
  const bool aligned = is_aligned(into) && is_aligned(from);
  const auto accumulated = [&](IntoBits so_far, FromBits bits) {
    const IntoBits converted = convert_element<Into, From>(bits, scale_inv);
    return add ? add_elements<Into>(so_far, converted) : converted;
  };
  share_out<kCount, 1>(
      count, 0, aligned ? count / kCount : 0,
      [&](int i) {
        const auto addend = load_vector<FromBits, kCount>(from + i);
        Vector<IntoBits, kCount> sum{};
        if (add) sum = load_vector<IntoBits, kCount>(into + i);
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum.element[j] = accumulated(sum.element[j], addend.element[j]);
        store_vector(into + i, sum);
      },
      [&](int i) {
        const IntoBits so_far = add ? load_element(into + i) : IntoBits{};
        *global(into + i) = accumulated(so_far, load_element(from + i));
      });
}

}  // namespace

cudaError_t launch_scale(DType dtype, const DeviceTable& table, cudaStream_t stream) {
  return with_dtype(
      dtype, [&]<DType D>() { return launch(scale_kernel<D>, table.count, kElementwiseThreads, stream, table); });
}

cudaError_t launch_combine(DType dtype, const CombineTable& table, cudaStream_t stream) {
  return with_dtype(dtype, [&]<DType D>() {
    return launch(combine_kernel<D>, table.addends.count, kElementwiseThreads, stream, table);
  });
}

cudaError_t launch_accumulate(DType into_dtype, DType from_dtype, std::byte* const* into, const DeviceTable& from,
                              bool add, cudaStream_t stream) {
  return with_dtype(into_dtype, [&]<DType Into>() {
    return with_dtype(from_dtype, [&]<DType From>() {
      return launch(accumulate_kernel<Into, From>, from.count, kElementwiseThreads, stream, into, from, add);
    });
  });
}

}  // namespace gradclip::cuda
