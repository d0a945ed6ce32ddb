#include <fmt/format.h>
#include <gnu/libc-version.h>
#include <sys/utsname.h>

#include "commands.hpp"
#include "gradclip/base/worker_pool.hpp"
#include "gradclip/comm/mpi_communicator.hpp"
#include "gradclip/dump/hdf5.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {
namespace {

FactSection versions() {
  utsname system{};
  static_cast<void>(uname(&system));
  return {"versions",
          {{"gradclip", GRADCLIP_VERSION},
           {"compiler", GRADCLIP_COMPILER},
           {"build_type", GRADCLIP_BUILD_TYPE},
           {"hdf5", hdf5::library_version()},
           {"hdf5_filters", "deflate, shuffle, fletcher32; others through HDF5_PLUGIN_PATH"},
           {"mpi", mpi_library_version()},
           {"fmt", fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)},
           {"cli11", cli11_version()},
           {"c_library", gnu_get_libc_version()},
           {"system", fmt::format("{} {} {}", system.sysname, system.release, system.machine)}}};
}

FactSection processor(const Session& session) {
  return {
      "processor",
      {{"model", processor_model()},
       {"features", processor_features()},
       {"processors",
        fmt::format("{} usable: {}", available_processors(), allowed_processors()),
        {{"processors", std::uint64_t{available_processors()}}, {"allowed_processors", allowed_processors()}}},
       {"threads", fmt::format("{} by default", session.threads()), {{"threads", std::uint64_t{session.threads()}}}}}};
}

FactSection memory(const Session& session) {
  const std::optional<std::uint64_t> limit = control_group_memory_limit();
  return {"memory",
          {{"physical",
            human_bytes(static_cast<double>(physical_memory())),
            {{"physical_bytes", std::uint64_t{physical_memory()}}}},
           {"control_group",
            limit ? human_bytes(static_cast<double>(*limit)) : "no limit",
            {{"control_group_bytes", limit ? ReportValue(*limit) : ReportValue(nullptr)}}},
           {"budget",
            fmt::format("{} a process by default", human_bytes(static_cast<double>(session.memory_budget()))),
            {{"budget_bytes", session.memory_budget()}}}}};
}

FactSection devices(Session& session) {
  const BackendDescription description = session.backend().backend->describe();
  FactSection section{
      "device", {{"chosen", description.device}, {"detail", description.detail}, {"why", session.backend().reason}}};
  if (description.working_space == MemorySpace::device) {
    const auto bytes = [](std::uint64_t count) { return human_bytes(static_cast<double>(count)); };
    section.facts.emplace_back(
        "memory",
        fmt::format("{} free, budget {} a process by default", bytes(description.device_memory),
                    bytes(session.device_memory_budget())),
        Fact::Values{{"free_bytes", description.device_memory}, {"budget_bytes", session.device_memory_budget()}});
    section.facts.emplace_back("identity", description.identity);
  }
  return section;
}

/// After backend().
FactSection communicator(Session& session) {
  const CommunicatorDescription description = session.comm().describe();
  return {"communicator",
          {{"chosen", description.name},
           {"detail", description.detail},
           {"why", session.launch_reason()},
           {"nccl",
            fmt::format("{}: {}", nccl_library_version(), session.nccl_reason()),
            {{"nccl", nccl_library_version()}, {"nccl_reason", session.nccl_reason()}}},
           {"processes",
            fmt::format("{}, {} on this host", session.comm().size(), description.processes_on_this_host),
            {{"processes", std::int64_t{session.comm().size()}},
             {"processes_on_this_host", std::int64_t{description.processes_on_this_host}}}}}};
}

}  // namespace

ExitCode run_doctor(Session& session, const CommandLine&) {
  session.check_report_path({}, {});
  static_cast<void>(session.backend());  // the communicator depends on it
  session.publish(
      FactSheet{"doctor", {versions(), processor(session), memory(session), devices(session), communicator(session)}});
  return ExitCode::done;
}

}  // namespace gradclip
