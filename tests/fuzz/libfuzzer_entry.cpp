// One program for each target: GRADCLIP_FUZZ_TARGET is its function.

#include <cstddef>
#include <cstdint>

#include "targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradclip::fuzz::GRADCLIP_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
