// Statistics of chunks: one block works on one chunk, in the order of sums that a CPU has, so with the same bits
// (reduction.hpp).

#include <type_traits>

#include "gradclip/backend/cuda/kernels.hpp"
#include "gradclip/backend/cuda/lanes.hpp"
#include "gradclip/base/dispatch.hpp"
#include "gradclip/cuda_runtime/launch.hpp"

namespace gradclip::cuda {
namespace {

/// The sub-blocks' sums folded by halves, in the block's first warp; its first thread has the result.
__device__ double fold_sub_blocks(const double (&sums)[kSubBlocks]) {
  constexpr unsigned kCount = kSubBlocks;
  double sum = sums[threadIdx.x % kCount];
#pragma unroll
  for (unsigned half = kCount / 2; half > 0; half /= 2) sum += __shfl_down_sync(kAllLanes, sum, half, kCount);
  return sum;
}

template <DType D, Terms T>
__global__ void __launch_bounds__(Geometry<D, T>::kBlock, kAnyOccupancy)
    statistics_kernel(DeviceTable table, StatisticsRequest request, ChunkStatistics* out) {
  using Magnitude = MagnitudeBits<ComputeOf<D>>;
  constexpr int kThreads = Geometry<D, T>::kThreads;
  constexpr int kElements = static_cast<int>(kSubBlockElements);
  __shared__ BlockTotals<Magnitude> totals;
  __shared__ std::uint8_t scaled_float8[is_float8(D) ? 256 : 1];

  const DeviceChunk chunk = table.chunks[blockIdx.x];
  const ScaleFactors factors = table.factors[chunk.factors];
  const bool changes = changes_bits(factors);
  const Scaling<D> scaling(factors, scaled_float8);
  const int sub_block = static_cast<int>(threadIdx.x) / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int first = sub_block * kElements;
  const int left = static_cast<int>(chunk.count) - first;
  const Share<D> share{global(reinterpret_cast<const BitsOf<D>*>(chunk.data)) + first,
                       left < 0 ? 0 : (left < kElements ? left : kElements), thread * Geometry<D, T>::kOwned,
                       static_cast<unsigned>(first)};

  Term term{request.terms, request.order.p, factors.normalizer, 1.0, factors.reference_in_float64};
  const bool exact = request.terms == TermArithmetic::exact;
  const bool scales_first = T == Terms::general && exact;  // needs the largest magnitude before the sums
  bool terms = !scales_first;
  int exponent = 0;
  for (bool again = true; again;) {
    if (threadIdx.x == 0) totals.clear(bits_as<Magnitude>(Owned<D, T>::infinity()));
    __syncthreads();
    Owned<D, T> owned;
    gather<D, T>(owned, share, changes, scaling, factors.scale_inv, term, terms, totals);
    const double power = fold_lanes(owned.power);
    const double sum = fold_lanes(owned.sum);
    if (thread == 0) {
      totals.power[sub_block] = power;
      totals.sum[sub_block] = sum;
    }
    max_of_warp(&totals.largest, bits_as<Magnitude>(owned.largest));
    min_of_warp(&totals.smallest, bits_as<Magnitude>(owned.smallest));
    add_of_warp(&totals.zeros, owned.zeros);
    add_of_warp(&totals.subnormals, owned.subnormals);
    __syncthreads();

    again = false;
    if constexpr (D == DType::float64 || T == Terms::general) {
      const double largest = static_cast<double>(bits_as<ComputeOf<D>>(totals.largest));
      const double smallest = static_cast<double>(bits_as<ComputeOf<D>>(totals.smallest));
      const bool unscaled = term.scaling == 1.0 && exponent == 0;
      if (exact && unscaled) {
        exponent = exponent_of(largest);
        const bool enough = !scales_first && sums_need_no_scaling(largest, smallest, term.p);
        again = !enough && (exponent != 0 || !terms);
        if (again) term.scaling = power_of_two(-exponent);
        terms = true;
      }
      __syncthreads();
    }
  }

  if (threadIdx.x < kWarp) {
    ChunkStatistics result;
    result.power_sum = fold_sub_blocks(totals.power);
    result.signed_sum = fold_sub_blocks(totals.sum);
    if (exponent != 0 && term.scaling == 1.0) scale_sums(result, term, exponent);
    result.max_abs = static_cast<double>(bits_as<ComputeOf<D>>(totals.largest));
    result.min_abs = static_cast<double>(bits_as<ComputeOf<D>>(totals.smallest));
    result.exponent = exponent;
    result.zeros = totals.zeros;
    result.subnormals = totals.subnormals;
    result.nan = totals.nan;
    result.posinf = totals.posinf;
    result.neginf = totals.neginf;
    result.first_nonfinite = totals.first_nonfinite;
    if (threadIdx.x == 0) out[chunk.position] = result;
  }
}

}  // namespace

cudaError_t launch_statistics(DType dtype, const DeviceTable& table, const StatisticsRequest& request,
                              ChunkStatistics* out, cudaStream_t stream) {
  const double p = request.order.p;
  return with_dtype(dtype, [&]<DType D>() {
    const auto with = [&]<Terms T>(std::integral_constant<Terms, T>) {
      return launch(statistics_kernel<D, T>, table.count, Geometry<D, T>::kBlock, stream, table, request, out);
    };
    const bool exact = request.terms == TermArithmetic::exact;
    const bool products = request.order.by_products() || request.order.infinite();
    if (exact && p == 2.0) return with(std::integral_constant<Terms, Terms::squares>{});
    if (exact && products) return with(std::integral_constant<Terms, Terms::products>{});
    return with(std::integral_constant<Terms, Terms::general>{});
  });
}

}  // namespace gradclip::cuda
