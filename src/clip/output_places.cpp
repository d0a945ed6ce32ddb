#include "gradclip/clip/output_places.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace gradclip {

void prepare_output(Communicator& comm, DumpWriter& output) {
  if (!output.several()) {
    if (comm.process() == 0) output.prepare();
    comm.barrier();
    return;
  }
  std::random_device random;
  const std::string signature = broadcast_string(comm, fmt::format("{:08x}{:08x}", random(), random()), 0);
  // One at a time, and before the others look: shared storage may remember for a while that there was nothing.
  for (int next = 0; next < comm.size();) {
    if (comm.process() == next) {
      output.prepare();
      output.sign(signature);
    }
    comm.barrier();
    const std::vector<std::uint8_t> ready = gather_value<std::uint8_t>(comm, output.is_signed(signature) ? 1 : 0);
    next = static_cast<int>(std::find(ready.begin(), ready.end(), 0) - ready.begin());
  }
}

void finish_output(Communicator& comm, DumpWriter& output, const ManifestChanges& changes) {
  const bool first = comm.process() == 0;
  if (!output.several()) {
    if (first) output.finish(changes);
    comm.barrier();
    return;
  }
  const std::string manifest = broadcast_string(comm, first ? output.manifest_with(changes) : std::string(), 0);
  try {
    if (!first && output.prepared()) output.finish_with(manifest);
    comm.barrier();
    if (first) output.finish_with(manifest);
    comm.barrier();
  } catch (...) {
    output.withdraw();
    throw;
  }
}

}  // namespace gradclip
