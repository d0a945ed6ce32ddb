#pragma once
// The composition root: which communicator, which backend, how many threads, how much memory, and why; and the one
// voice of the program: only process 0 writes, results to stdout, everything else to stderr.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "gradclip/backend/backend.hpp"
#include "gradclip/comm/communicator.hpp"
#include "gradclip/norm/total_norm.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/report/text.hpp"
#include "machine.hpp"
#include "options.hpp"

namespace gradclip {

/// The communicator that the launcher's environment asks for. MPI is not started without a launcher.
/// Errors: Error(usage) under torchrun without an MPI launcher, PeerFailed in the processes that leave it to another
/// one of their host to say so; Error(resources) if MPI does not start.
[[nodiscard]] std::unique_ptr<Communicator> make_communicator(const Launch& launch, int* argc, char*** argv);

/// Thrown where nobody reads stdout any more (`| head`): ends the run with ExitCode::resources and without a message.
struct StdoutClosed {};

/// A line on stderr that says how far this process is: a moving one on a terminal, a new one every 10 s elsewhere.
class Progress {
 public:
  enum class Mode : std::uint8_t { off, moving, lines };

  explicit Progress(Mode mode) : mode_(mode) {}
  ~Progress() { end(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void begin(double total_bytes);
  /// Thread-safe and cheap.
  void add(std::uint64_t bytes) noexcept;
  /// Takes the moving line away. Nothrow.
  void end() noexcept;

 private:
  void show(double seconds) noexcept;

  Mode mode_;
  double total_bytes_ = 0.0;
  std::atomic<std::uint64_t> done_bytes_{0};
  std::atomic<std::int64_t> next_milliseconds_{0};
  std::mutex mutex_;  // over what is on the screen
  bool on_screen_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

class Session {
 public:
  /// Collective. @param comm  outlives the session
  Session(Communicator& comm, Launch launch, const CommonOptions& options, const Environment& environment);

  [[nodiscard]] Communicator& comm() noexcept { return comm_; }
  [[nodiscard]] bool speaks() const noexcept { return comm_.process() == 0; }
  /// Why this communicator: one sentence.
  [[nodiscard]] std::string launch_reason() const;
  [[nodiscard]] std::size_t threads() const noexcept { return threads_; }
  [[nodiscard]] std::uint64_t memory_budget() const noexcept { return memory_budget_; }

  /// Chosen at the first call. Errors: Error(resources) if the device asked for is not available.
  [[nodiscard]] const ChosenBackend& backend();

  /// Everything that a pass over a dump works with. @param passes  over the gradients, for the progress line
  [[nodiscard]] Run run_over(DumpReader& dump, int passes);

  /// Refuses a --report that cannot be written at the end, before the work begins.
  /// Errors: Error(usage): inside the input dump, the output itself, in no directory, a directory.
  void check_report_path(const std::filesystem::path& dump, const std::filesystem::path& output) const;

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
  void write_report_file(const std::function<void(std::ostream&)>& write) const;
  void write_stdout(const std::function<void(std::ostream&)>& write) const;

  Communicator& comm_;
  Launch launch_;
  CommonOptions options_;
  TextStyle style_;
  std::size_t threads_ = 1;
  std::uint64_t memory_budget_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::optional<ChosenBackend> backend_;
  Progress progress_;
  std::unique_ptr<ShardStream> stream_;
};

}  // namespace gradclip
