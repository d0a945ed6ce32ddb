#pragma once
// The way to the CUDA backend, the same in a build without CUDA.

#include "gradclip/backend/backend.hpp"

namespace gradclip {

/// The CUDA backend, or an empty pointer and the reason why there is none: a build without CUDA (cuda_absent.cpp is
/// then linked in the real one's place), a machine without a driver, no device.
[[nodiscard]] ChosenBackend try_cuda_backend(std::size_t process_on_host);

}  // namespace gradclip
