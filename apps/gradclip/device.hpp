#pragma once
// One device for all processes, or the CPU for all.

#include <cstddef>
#include <functional>

#include "gradclip/backend/backend.hpp"
#include "gradclip/comm/communicator.hpp"

namespace gradclip {

struct AgreedBackend {
  ChosenBackend chosen;
  std::size_t sharers = 1;  ///< processes that use this one's device, itself included
};

/// Every process's backend by make_backend(). A device only if every process has one; else the CPU for all, and the
/// reason names the first process without. Collective.
/// Errors: as make_backend(); Error(resources) where this process was told to use a device and another one has none.
/// @param make  make_backend(), or what stands in for it in a test
[[nodiscard]] AgreedBackend agree_on_backend(
    Communicator& comm, DeviceChoice choice, std::size_t process_on_host,
    const std::function<ChosenBackend(DeviceChoice, std::size_t)>& make = make_backend);

}  // namespace gradclip
