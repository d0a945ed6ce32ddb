#include "session.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <ostream>
#include <string_view>
#include <system_error>

#include "device.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/base/worker_pool.hpp"
#include "gradclip/comm/mpi_communicator.hpp"
#include "gradclip/report/structured.hpp"
#include "launch.hpp"
#include "locality.hpp"
#include "output.hpp"

namespace gradclip {
namespace {

/// What an open rank file remembers of one located shard, at most; and files that are kept open all the same.
constexpr std::size_t kLocatedShardBytes = 1024;
constexpr std::size_t kLeastOpenFiles = 2;  // two copies that are compared
constexpr std::uint64_t kLeastMemory = std::uint64_t{64} << 20;

bool is_set(const Environment& environment, const char* name) {
  const char* value = environment(name);
  return value != nullptr && *value != '\0';
}

/// Whether the locale's characters are UTF-8, by the variables that tell: the first that is set counts.
bool speaks_utf8(const Environment& environment) {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    if (!is_set(environment, name)) continue;
    std::string locale(environment(name));
    std::transform(locale.begin(), locale.end(), locale.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return locale.find("utf-8") != std::string::npos || locale.find("utf8") != std::string::npos;
  }
  return false;
}

/// Open MPI gives every process a terminal for stdout, wherever mpirun's own goes.
TextStyle style_of(const CommonOptions& options, const Launch& launch, const Environment& environment) {
  const bool terminal = launch.launcher == Launcher::none && isatty(STDOUT_FILENO) == 1;
  TextStyle style;
  switch (options.colour) {
    case ColourChoice::always:
      style.colour = true;
      break;
    case ColourChoice::never:
      style.colour = false;
      break;
    case ColourChoice::automatic: {
      const char* force = environment("CLICOLOR_FORCE");
      const char* kind = environment("TERM");
      const bool forced = force != nullptr && *force != '\0' && std::string_view(force) != "0";
      const bool dumb = kind != nullptr && std::string_view(kind) == "dumb";
      style.colour = !is_set(environment, "NO_COLOR") && !dumb && (terminal || forced);
    }
  }
  style.unicode = speaks_utf8(environment);
  winsize size{};
  if (terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) style.width = size.ws_col;
  return style;
}

Progress::Mode progress_mode(const CommonOptions& options, const Launch& launch, bool speaks) {
  if (!speaks || options.quiet || !options.progress.value_or(true)) return Progress::Mode::off;
  const bool terminal = isatty(STDERR_FILENO) == 1;
  if (launch.launcher == Launcher::none || options.progress) {
    if (terminal) return Progress::Mode::moving;
    return options.progress ? Progress::Mode::lines : Progress::Mode::off;
  }
  return Progress::Mode::lines;
}

/// Processes that share this one's processors, as far as threads go; and those of its host, as far as memory goes.
struct Neighbours {
  std::size_t same_processors = 0;
  std::size_t same_host = 0;
  std::size_t before_on_host = 0;  ///< those of its host with lower numbers
};

Neighbours count_neighbours(Communicator& comm) {
  struct Place {
    std::uint64_t host;
    std::uint64_t processors;
  };
  const Place mine{host_of_process(), place_of_process()};
  Neighbours neighbours;
  const std::vector<Place> all = gather_value(comm, mine);
  for (std::size_t process = 0; process < all.size(); ++process) {
    const bool same_host = all[process].host == mine.host;
    neighbours.same_host += same_host ? 1 : 0;
    neighbours.before_on_host += same_host && process < static_cast<std::size_t>(comm.process()) ? 1 : 0;
    neighbours.same_processors += all[process].processors == mine.processors ? 1 : 0;
  }
  return neighbours;
}

bool is_inside(const std::filesystem::path& path, const std::filesystem::path& directory) {
  const auto [end, rest] = std::mismatch(directory.begin(), directory.end(), path.begin(), path.end());
  return end == directory.end();
}

[[noreturn]] void refuse_path(const std::string& option, const std::filesystem::path& path, std::string found,
                              std::string expected) {
  throw Error(ExitCode::usage, {.where = option + " " + gradclip::quoted(path.string()),
                                .found = std::move(found),
                                .expected = std::move(expected),
                                .advice = {}});
}

}  // namespace

std::unique_ptr<Communicator> make_communicator(const Launch& launch, int* argc, char*** argv, HostBoard& board) {
  switch (launch.launcher) {
    case Launcher::none:
      return make_single_process_communicator();
    case Launcher::mpi:
      return make_mpi_communicator(argc, argv, board);
    case Launcher::torchrun:  // what may run so is single (require_launcher)
      return make_single_process_communicator();
  }
  throw Error(ExitCode::bug, {.where = "launcher", .found = "is of no kind", .expected = {}, .advice = {}});
}

void require_launcher(const Launch& launch, const CommandLine& line) {
  if (launch.launcher != Launcher::torchrun || line.answer) return;
  if (line.command == Command::inspect || line.command == Command::report || line.command == Command::doctor) return;
  if (!launch.first_on_host) throw PeerFailed{ExitCode::usage};
  throw Error(
      ExitCode::usage,
      {.where = "launcher",
       .found = "RANK is set and no MPI launcher's variables are: under torchrun every process would do the whole "
                "work by itself",
       .expected = "one process, or mpirun -np N gradclip ...",
       .advice = "start gradclip without torchrun, or unset RANK"});
}

Session::Session(Communicator& comm, Launch launch, const CommonOptions& options, const Environment& environment)
    : comm_(comm),
      counting_(comm),
      launch_(std::move(launch)),
      options_(options),
      style_(style_of(options, launch_, environment)),
      progress_(progress_mode(options, launch_, comm.process() == 0)) {
  const Neighbours neighbours = count_neighbours(comm);
  process_on_host_ = neighbours.before_on_host;
  threads_ = options.threads.value_or(std::max<std::size_t>(available_processors() / neighbours.same_processors, 1));
  const std::uint64_t memory = std::min(physical_memory(), control_group_memory_limit().value_or(physical_memory()));
  memory_budget_ = options.memory_budget.value_or(std::max(memory / 2 / neighbours.same_host, kLeastMemory));
  // Rounds that all processes take part in are cut by the budget: hosts of different sizes must agree on one.
  for (const std::uint64_t theirs : gather_value(comm, memory_budget_))
    memory_budget_ = std::min(memory_budget_, theirs);
}

const ChosenBackend& Session::backend() {
  if (backend_) return *backend_;
  AgreedBackend agreed = agree_on_backend(comm_, options_.device, process_on_host_);
  backend_ = std::move(agreed.chosen);
  const BackendDescription description = backend_->backend->describe();
  if (description.working_space == MemorySpace::host) {
    nccl_.reason = "gradients are worked on in host memory";
  } else {
    device_memory_budget_ = options_.device_memory_budget.value_or(description.device_memory / 2 / agreed.sharers);
    nccl_ = try_nccl_communicator(comm_, description.identity);
    if (nccl_.communicator) counting_.pass_on_to(*nccl_.communicator);
  }
  return *backend_;
}

std::string Session::launch_reason() const {
  return launch_.launcher == Launcher::mpi ? "the launcher set " + launch_.sign : "no MPI launcher started this run";
}

Manifest Session::manifest_of(const std::filesystem::path& dump) {
  if (by_locality()) return manifest_of_first(comm(), dump);
  Manifest manifest = read_manifest(dump);
  require_one_manifest(comm(), dump, manifest.text_checksum);
  return manifest;
}

WorkPlan Session::plan_over(const DumpReader& dump) {
  if (!by_locality()) return plan_work(dump.manifest(), comm_.size());
  LocalWork work = plan_local_work(comm(), dump);
  locality_ = std::move(work.summary);
  return std::move(work.plan);
}

Run Session::run_over(DumpReader& dump, int passes) {
  WorkPlan plan = plan_over(dump);
  limit_open_files(dump, memory_budget_ / 4);
  StreamOptions stream;
  stream.threads = threads_;
  stream.memory_budget = memory_budget_;
  stream.offload = options_.offload;
  if (speaks()) {
    progress_.begin(bytes_of_process(dump.manifest(), plan) * passes);
    stream.progress = [this](std::uint64_t finished) { progress_.add(finished); };
  }
  Backend& device = *backend().backend;
  stream.device_memory_budget = device_memory_budget_;
  if (stream_) {
    const StreamTimes times = stream_->times();
    earlier_times_ = {earlier_times_.read + times.read, earlier_times_.compute + times.compute,
                      earlier_times_.write + times.write};
  }
  stream_ = std::make_unique<ShardStream>(device, stream);
  if (passes == 1) stream_->storage().keep_no_more();
  return Run{dump, device, comm(), std::move(plan), *stream_};
}

DiffRun Session::run_over(DumpReader& a, DumpReader* b, const char* why) {
  backend_ = make_backend(DeviceChoice::cpu);
  backend_->reason = why;
  nccl_.reason = backend_->reason;
  double mine = 0.0;
  for (DumpReader* dump : {&a, b}) {
    if (dump == nullptr) continue;
    limit_open_files(*dump, memory_budget_ / 8);
    mine += bytes_of_process(dump->manifest(), plan_work(dump->manifest(), comm_.size()));
  }
  DiffRun run{{&a, b}, comm(), threads_, memory_budget_, {}};
  if (speaks()) run.progress = begin_progress(mine);
  return run;
}

AccumulateRun Session::run_over(const MicrobatchDumps& dumps) {
  Backend& device = *backend().backend;
  const bool on_device = device.describe().working_space == MemorySpace::device;
  AccumulateRun run{dumps, comm(),        device, threads_, (on_device ? device_memory_budget_ : memory_budget_) / 2,
                    {},    memory_budget_};
  double mine = 0.0;
  for (const std::unique_ptr<DumpReader>& dump : dumps) {
    limit_open_files(*dump, memory_budget_ / 4 / dumps.size());
    dump->keep_at_most(dump->capacity() / dumps.size());  // descriptors are for all of them together
    mine += bytes_of_process(dump->manifest(), plan_work(dump->manifest(), comm_.size()));
  }
  if (speaks()) run.progress = begin_progress(mine);
  return run;
}

double Session::bytes_of_process(const Manifest& manifest, const WorkPlan& plan) const {
  const std::vector<double> bytes = bytes_by_rank(manifest);
  double mine = 0.0;
  for (const std::int32_t rank : plan.ranks(comm_.process())) mine += bytes[static_cast<std::size_t>(rank)];
  return mine;
}

std::function<void(std::uint64_t)> Session::begin_progress(double bytes) {
  progress_.begin(bytes);
  return [this](std::uint64_t finished) { progress_.add(finished); };
}

void Session::limit_open_files(DumpReader& dump, std::uint64_t memory) {
  const std::size_t of_a_file =
      kLocatedShardBytes * std::max<std::size_t>(1, most_parameters_of_a_rank(dump.manifest()));
  dump.keep_at_most(std::max<std::size_t>(kLeastOpenFiles, memory / of_a_file));
}

void Session::check_report_path(const std::filesystem::path& dump, const std::filesystem::path& output) const {
  if (options_.report) check_written_path("--report", *options_.report, dump, output);
}

void Session::check_written_path(const std::string& option, const std::filesystem::path& path,
                                 const std::filesystem::path& dump, const std::filesystem::path& output) {
  const auto refuse = [&](std::string found, std::string expected) {
    refuse_path(option, path, std::move(found), std::move(expected));
  };
  std::error_code error;
  const std::filesystem::path file = resolved_path(path, error);
  if (error) refuse(error.message(), "a file that can be written");
  const std::filesystem::path input = std::filesystem::canonical(dump, error);
  if (!dump.empty() && !error && is_inside(file, input)) refuse("it lies inside the input dump", "a file elsewhere");
  if (std::filesystem::is_directory(file, error)) refuse("it is a directory", "a file's name");
  if (!output.empty()) {
    const std::filesystem::path clipped = resolved_path(output, error);
    if (file == clipped) refuse("it is the output dump", "a file's name");
    if (is_inside(file, clipped)) refuse("it lies inside the output dump", "a file elsewhere");
  }
  if (!std::filesystem::is_directory(file.parent_path(), error)) {
    refuse("its directory does not exist", "a file in an existing directory");
  }
}

ReportRun Session::facts(Numerics numerics) {
  progress_.end();
  const BackendDescription device = backend().backend->describe();
  const CommunicatorDescription communicator = comm().describe();
  const bool on_device = device.working_space == MemorySpace::device;
  StreamTimes times = earlier_times_;
  if (stream_) {
    times.read += stream_->times().read;
    times.compute += stream_->times().compute;
    times.write += stream_->times().write;
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  struct Mine {
    std::uint64_t memory_peak, device_peak, device_budget;
    double read, compute, write, total;
    CommunicationVolume volume;
  };
  const std::size_t workers = stream_ ? stream_->options().threads : threads_;
  const auto average = [&](double seconds) { return seconds / static_cast<double>(workers); };
  const Mine mine{peak_memory(),          device.device_memory_peak, device_memory_budget_, average(times.read),
                  average(times.compute), average(times.write),      elapsed.count(),       counting_.volume()};

  ReportRun run;
  run.processes = comm_.size();
  run.device = device.device;
  run.device_detail = device.detail;
  run.device_reason = backend().reason;
  run.communicator = communicator.name;
  if (launch_.launcher == Launcher::mpi) run.communicator_detail = communicator.detail;
  run.communicator_reason = launch_reason();
  if (on_device && comm_.size() > 1) run.communicator_reason += "; " + nccl_.reason;
  run.threads = threads_;
  run.numerics = name(numerics);
  run.memory_budget_bytes = memory_budget_;
  if (on_device) {
    run.device_memory_budget_bytes = device_memory_budget_;
    run.device_memory_peak_bytes = 0;
  }
  if (options_.offload) {
    run.offload = on_device ? "one model part at a time on the device"
                            : "nothing to move: gradients are worked on in host memory";
  }
  run.locality = locality_;
  ReportSeconds slowest;
  for (const Mine& other : gather_value(comm_, mine)) {
    run.memory_peak_bytes = std::max(run.memory_peak_bytes, other.memory_peak);
    if (on_device) {
      run.device_memory_peak_bytes = std::max(*run.device_memory_peak_bytes, other.device_peak);
      run.device_memory_budget_bytes = std::min(*run.device_memory_budget_bytes, other.device_budget);
    }
    slowest = {std::max(slowest.read, other.read), std::max(slowest.compute, other.compute),
               std::max(slowest.write, other.write)};
    run.seconds_total = std::max(run.seconds_total, other.total);
    run.communication = {std::max(run.communication.collectives, other.volume.collectives),
                         std::max(run.communication.bytes_sent, other.volume.bytes_sent),
                         std::max(run.communication.bytes_received, other.volume.bytes_received)};
  }
  if (stream_) run.seconds_of_a_thread = slowest;
  return run;
}

void Session::publish(const Report& report,
                      const std::function<void(const Report&, const TextStyle&, std::ostream&)>& text) const {
  if (!speaks()) return;
  if (options_.report) {
    const ReportFormat format = report_format(*options_.report);
    write_report_file([&](std::ostream& out) { write(report, format, out); });
  }
  if (options_.format == OutputFormat::json) {
    write_stdout([&](std::ostream& out) { write_json(report, out); });
  } else if (!options_.quiet) {
    write_stdout([&](std::ostream& out) { text(report, style_, out); });
  }
}

void Session::publish(const FactSheet& sheet) const {
  if (!speaks()) return;
  if (options_.report) {
    const ReportFormat format = report_format(*options_.report);
    write_report_file(
        [&](std::ostream& out) { format == ReportFormat::csv ? write_csv(sheet, out) : write_json(sheet, out); });
  }
  if (options_.format == OutputFormat::json) {
    write_stdout([&](std::ostream& out) { write_json(sheet, out); });
  } else if (!options_.quiet) {
    write_stdout([&](std::ostream& out) { write_facts(sheet, style_, out); });
  }
}

void Session::print(const std::string& text) const {
  if (speaks()) write_stdout([&](std::ostream& out) { out << text; });
}

void Session::write_report_file(const std::function<void(std::ostream&)>& write) const {
  write_whole_file(*options_.report, write);
}

void Session::write_stdout(const std::function<void(std::ostream&)>& write) const {
  DescriptorBuffer buffer(STDOUT_FILENO);
  std::ostream out(&buffer);
  out.exceptions(std::ios::badbit);
  try {
    write(out);
    out.flush();
  } catch (const std::system_error& error) {
    if (error.code().value() == EPIPE) throw StdoutClosed{};
    throw Error(ExitCode::resources,
                {.where = "stdout", .found = "cannot write: " + error.code().message(), .expected = {}, .advice = {}});
  }
}

}  // namespace gradclip
