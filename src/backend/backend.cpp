#include "gradclip/backend/backend.hpp"

#include "gradclip/backend/cpu/cpu_backend.hpp"
#include "gradclip/backend/cuda/cuda_backend.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip {

ChosenBackend make_backend(DeviceChoice choice, std::size_t process_on_host) {
  if (choice == DeviceChoice::cpu) return {.backend = make_cpu_backend(), .reason = "asked for"};
  ChosenBackend cuda = try_cuda_backend(process_on_host);
  if (choice == DeviceChoice::cuda && cuda.backend == nullptr) {
    throw Error(ExitCode::resources, {.where = "--device cuda",
                                      .found = cuda.reason,
                                      .expected = "a CUDA device",
                                      .advice = "use --device auto or --device cpu"});
  }
  if (cuda.backend != nullptr) return cuda;
  return {.backend = make_cpu_backend(), .reason = cuda.reason};
}

}  // namespace gradclip
