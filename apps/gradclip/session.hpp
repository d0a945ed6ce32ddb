#pragma once
// The composition root: which communicator, which backend, how many threads, how much memory, and why; and the one
// voice of the program: only process 0 writes, results to stdout, everything else to stderr.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>

#include "gradclip/analysis/block_exchange.hpp"
#include "gradclip/backend/backend.hpp"
#include "gradclip/comm/communicator.hpp"
#include "gradclip/comm/counting_communicator.hpp"
#include "gradclip/comm/host_board.hpp"
#include "gradclip/comm/nccl_communicator.hpp"
#include "gradclip/norm/total_norm.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/training/accumulate.hpp"
#include "machine.hpp"
#include "options.hpp"
#include "progress.hpp"

namespace gradclip {

/// The communicator that the launcher's environment asks for. MPI is not started without a launcher.
/// Under torchrun every process is alone: require_launcher() says what may run so.
/// @param board  outlives the result  Errors: Error(resources) if MPI does not start.
[[nodiscard]] std::unique_ptr<Communicator> make_communicator(const Launch& launch, int* argc, char*** argv,
                                                              HostBoard& board);

/// Thrown where nobody reads stdout any more (`| head`): ends the run with ExitCode::resources and without a message.
struct StdoutClosed {};

class Session {
 public:
  /// Collective. @param comm  outlives the session
  Session(Communicator& comm, Launch launch, const CommonOptions& options, const Environment& environment);

  /// Counts what it carries. NCCL's where backend() found that every process has a device of its own, else the base.
  [[nodiscard]] Communicator& comm() noexcept { return counting_; }
  [[nodiscard]] bool speaks() const noexcept { return comm_.process() == 0; }
  /// Why this base communicator: one sentence.
  [[nodiscard]] std::string launch_reason() const;
  /// Why NCCL, or why not: one sentence. After backend().
  [[nodiscard]] const std::string& nccl_reason() const noexcept { return nccl_.reason; }
  [[nodiscard]] std::size_t threads() const noexcept { return threads_; }
  [[nodiscard]] std::uint64_t memory_budget() const noexcept { return memory_budget_; }

  /// Chosen at the first call, which is collective: all processes have a device, or none. Errors: Error(resources) if
  /// the device asked for is not available.
  [[nodiscard]] const ChosenBackend& backend();

  /// Bytes of device memory of this process; 0 without a device. After backend().
  [[nodiscard]] std::uint64_t device_memory_budget() const noexcept { return device_memory_budget_; }

  /// The dump's manifest, read as --locality says, the same for all processes. Collective.
  /// Errors: as read_manifest(), require_one_manifest() and manifest_of_first().
  [[nodiscard]] Manifest manifest_of(const std::filesystem::path& dump);
  /// The dump with that manifest. Collective. Errors: as manifest_of().
  [[nodiscard]] DumpReader open(const std::filesystem::path& dump) { return {dump, manifest_of(dump)}; }
  [[nodiscard]] bool by_locality() const noexcept { return options_.locality == Locality::files; }

  /// Everything that a pass over a dump works with. Collective.
  /// @param passes  over the gradients: for the progress line, and because one alone keeps nothing
  [[nodiscard]] Run run_over(DumpReader& dump, int passes);

  /// The same for work in global coordinates, which is done in host memory.
  /// @param b  null: there is one dump alone
  /// @param why  it is: a sentence
  [[nodiscard]] DiffRun run_over(DumpReader& a, DumpReader* b, const char* why);

  /// For a replay of a step's microbatches, on the chosen device. Collective.
  [[nodiscard]] AccumulateRun run_over(const MicrobatchDumps& dumps);
  /// A progress line of `bytes` of work. @return to be told of finished bytes, from any thread
  [[nodiscard]] std::function<void(std::uint64_t)> begin_progress(double bytes);

  /// Refuses a --report that cannot be written at the end, before the work begins.
  /// Errors: Error(usage): inside the input dump, the output itself, in no directory, a directory.
  void check_report_path(const std::filesystem::path& dump, const std::filesystem::path& output) const;

  /// The same for any file that will be written. @param option  that names it
  static void check_written_path(const std::string& option, const std::filesystem::path& path,
                                 const std::filesystem::path& dump, const std::filesystem::path& output = {});

  /// How the run went so far. Collective.
  [[nodiscard]] ReportRun facts(Numerics numerics);

  /// In process 0: writes the report file, then stdout: the report as JSON, or as text by `text`.
  /// Errors: Error(resources), StdoutClosed.
  void publish(const Report& report,
               const std::function<void(const Report&, const TextStyle&, std::ostream&)>& text) const;
  void publish(const FactSheet& sheet) const;
  /// In process 0: help and version.
  void print(const std::string& text) const;

  void end_progress() noexcept { progress_.end(); }

 private:
  [[nodiscard]] WorkPlan plan_over(const DumpReader& dump);
  /// An open rank file remembers the shards that were located in it: keeps them within `memory` bytes.
  static void limit_open_files(DumpReader& dump, std::uint64_t memory);
  /// Of the gradients that this process's recorded ranks hold.
  [[nodiscard]] double bytes_of_process(const Manifest& manifest, const WorkPlan& plan) const;
  void write_report_file(const std::function<void(std::ostream&)>& write) const;
  void write_stdout(const std::function<void(std::ostream&)>& write) const;

  Communicator& comm_;
  CountingCommunicator counting_;
  Launch launch_;
  CommonOptions options_;
  TextStyle style_;
  std::size_t threads_ = 1;
  std::uint64_t memory_budget_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::size_t process_on_host_ = 0;
  std::optional<ChosenBackend> backend_;
  std::uint64_t device_memory_budget_ = 0;
  ChosenCommunicator nccl_;
  Progress progress_;
  std::unique_ptr<ShardStream> stream_;
  StreamTimes earlier_times_;  ///< of the streams before it
  std::optional<std::string> locality_;
};

}  // namespace gradclip
