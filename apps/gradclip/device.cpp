#include "device.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "gradclip/base/error.hpp"
#include "machine.hpp"

namespace gradclip {

AgreedBackend agree_on_backend(Communicator& comm, DeviceChoice choice, std::size_t process_on_host,
                               const std::function<ChosenBackend(DeviceChoice, std::size_t)>& make) {
  struct Place {
    std::uint64_t has_device;
    std::uint64_t device;
  };
  AgreedBackend agreed;
  agreed.chosen = make(choice, process_on_host);  // its failure ends the others at the gathering
  const BackendDescription description = agreed.chosen.backend->describe();
  const bool has_device = description.working_space == MemorySpace::device;
  const Place mine{has_device ? 1u : 0u, std::hash<std::string>{}(description.identity)};
  const std::vector<Place> all = gather_value(comm, mine);

  const auto with = static_cast<std::size_t>(
      std::count_if(all.begin(), all.end(), [](const Place& place) { return place.has_device != 0; }));
  if (with == all.size()) {
    agreed.sharers = static_cast<std::size_t>(
        std::count_if(all.begin(), all.end(), [&](const Place& place) { return place.device == mine.device; }));
  } else if (with != 0) {
    const auto without = std::find_if(all.begin(), all.end(), [](const Place& place) { return place.has_device == 0; });
    const auto process = static_cast<int>(without - all.begin());
    const std::string why = broadcast_string(
        comm, fmt::format("process {} on {} has no device: {}", process, host_name(), agreed.chosen.reason), process);
    if (has_device && choice == DeviceChoice::cuda) {
      throw Error(ExitCode::resources, {.where = "--device cuda",
                                        .found = why,
                                        .expected = "a CUDA device for every process",
                                        .advice = "use --device auto or --device cpu"});
    }
    if (has_device) agreed.chosen = make(DeviceChoice::cpu, process_on_host);
    agreed.chosen.reason = why;
  }
  return agreed;
}

}  // namespace gradclip
