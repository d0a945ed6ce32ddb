#pragma once
// What each process sees of a dump: one manifest for all; and --locality files: hosts with storage of their own, each
// of which sees some of the rank files.

#include <cstdint>
#include <filesystem>
#include <string>

#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/stream/work_plan.hpp"

namespace gradclip {

/// Refuses a run whose processes read different manifests: hosts whose directories of this name are not the same, a
/// dump that is replaced just now, a DUMP for each part of mpirun's command line. Collective.
/// @param text_checksum  of what this process read; 0 if it was no manifest  Errors: Error(bad_input) naming processes.
void require_one_manifest(Communicator& comm, const std::filesystem::path& directory, std::uint64_t text_checksum);

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
