#include "gradclip/backend/cuda/cuda_backend.hpp"

namespace gradclip {

ChosenBackend try_cuda_backend(std::size_t) {
  return {.backend = nullptr, .reason = "this build has no CUDA"};
}

}  // namespace gradclip
