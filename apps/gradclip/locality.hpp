#pragma once
// --locality files: hosts with storage of their own, each of which sees some of the rank files.

#include <filesystem>
#include <string>

#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/stream/work_plan.hpp"

namespace gradclip {

/// The manifest as process 0 sees it, for all. Collective.
/// Errors: as read_manifest() in process 0; Error(bad_input) naming the hosts that have another manifest.
[[nodiscard]] Manifest manifest_of_first(Communicator& comm, const std::filesystem::path& directory);

struct LocalWork {
  WorkPlan plan;
  std::string summary;  ///< which host serves how many ranks: a sentence
};

/// Plans by what each process sees of the dump's directory. Collective; every process gets the same.
/// Errors: Error(bad_input) naming the ranks whose files no process sees, or a file of which hosts see different sizes.
[[nodiscard]] LocalWork plan_local_work(Communicator& comm, const DumpReader& dump);

}  // namespace gradclip
