#include "gradclip/analysis/difference_kernels.hpp"

#include <cstring>

namespace gradclip::difference {
namespace {

namespace baseline {
#define GRADCLIP_TARGET
#include "gradclip/analysis/difference_loops.inl"
#undef GRADCLIP_TARGET
}  // namespace baseline

namespace avx2 {
#define GRADCLIP_TARGET __attribute__((target("avx2")))
#include "gradclip/analysis/difference_loops.inl"
#undef GRADCLIP_TARGET
}  // namespace avx2

namespace avx512 {
#define GRADCLIP_TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl")))
#include "gradclip/analysis/difference_loops.inl"
#undef GRADCLIP_TARGET
}  // namespace avx512

}  // namespace

std::size_t all_kernels(const Kernels* (&variants)[3]) noexcept {
  std::size_t count = 0;
  variants[count++] = &baseline::kKernels;
  if (__builtin_cpu_supports("avx2") != 0) variants[count++] = &avx2::kKernels;
  if (__builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
      __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vl") != 0) {
    variants[count++] = &avx512::kKernels;
  }
  return count;
}

const Kernels& kernels() noexcept {
  static const Kernels& best = []() -> const Kernels& {
    const Kernels* variants[3];
    return *variants[all_kernels(variants) - 1];
  }();
  return best;
}

}  // namespace gradclip::difference
