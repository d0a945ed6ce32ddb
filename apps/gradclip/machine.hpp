#pragma once
// What the operating system and the launcher say about this process: facts, no choices.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace gradclip {

/// The value of an environment variable, or nullptr.
using Environment = std::function<const char*(const char* name)>;

/// The process's own.
[[nodiscard]] Environment process_environment();

enum class Launcher : std::uint8_t { none, mpi, torchrun };

struct Launch {
  Launcher launcher = Launcher::none;
  std::string sign;           ///< the variable that told, empty for none
  bool first_on_host = true;  ///< torchrun: LOCAL_RANK is 0 or missing
};

/// MPI: OMPI_COMM_WORLD_SIZE, PMI_RANK with PMI_SIZE, or PMIX_RANK is set (Slurm sets the latter two with its PMI
/// plugins; SLURM_PROCID alone also stands in a batch script that runs one process, and says nothing). torchrun: RANK
/// is set and none of those, and WORLD_SIZE is not 1.
[[nodiscard]] Launch detect_launch(const Environment& environment);

/// Bytes.
[[nodiscard]] std::uint64_t physical_memory();

/// The smallest memory limit of this process's control groups and their ancestors, version 2 or 1. Empty without one.
/// @param root  where proc and sys are; for tests.
[[nodiscard]] std::optional<std::uint64_t> control_group_memory_limit(const std::filesystem::path& root = "/");

/// Most memory that this process has had resident so far: VmHWM.
[[nodiscard]] std::uint64_t peak_memory();

/// "0-3,8": the processors that this process may run on.
[[nodiscard]] std::string allowed_processors();

/// Model name and the instruction sets that matter here, from /proc/cpuinfo.
[[nodiscard]] std::string processor_model();
[[nodiscard]] std::string processor_features();

[[nodiscard]] std::string host_name();

/// A number that is equal for two processes on the same host with the same affinity, and else almost surely differs.
[[nodiscard]] std::uint64_t place_of_process();
/// The same for the host alone.
[[nodiscard]] std::uint64_t host_of_process();

}  // namespace gradclip
