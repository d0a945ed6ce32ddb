// The helper's own side of check_helper.hpp: it reads the manifest, never a rank file, and forks for each of these, so
// that what one does to the memory of its process is gone with it.

#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <new>
#include <optional>
#include <string_view>
#include <system_error>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/verify/check_helper.hpp"
#include "gradclip/verify/check_message.hpp"
#include "gradclip/verify/check_pipe.hpp"

namespace gradclip {
namespace {

// A chunk of 256 MiB, stored and inflated, and what holds recently read ones.
constexpr std::uint64_t kHelperMemory = std::uint64_t{1} << 30;
// A file's processor time: far more than any takes that is whole, even on a slow machine.
constexpr rlim_t kSecondsForAnyFile = 20;
constexpr std::uintmax_t kBytesPerSecond = std::uintmax_t{256} << 10;

void limit(__rlimit_resource resource, rlim_t most) {
  rlimit current{};
  if (::getrlimit(resource, &current) != 0) return;
  current.rlim_cur = std::min(current.rlim_max, most);
  ::setrlimit(resource, &current);
}

/// Address space that is in use, in bytes.
std::uint64_t used_memory() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t pages = 0;
  file >> pages;
  return file ? pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) : 0;
}

void limit_memory() {
  if (const std::uint64_t used = used_memory(); used != 0) limit(RLIMIT_AS, used + kHelperMemory);
}

/// A limit that passes ends the process.
void limit_time(const std::filesystem::path& file) {
  std::error_code unknown;
  const std::uintmax_t bytes = std::filesystem::file_size(file, unknown);
  limit(RLIMIT_CPU, kSecondsForAnyFile + (unknown ? 0 : bytes / kBytesPerSecond));
}

/// @param text_checksum  of what this helper's starter read
Manifest read_again(const std::filesystem::path& directory, std::string_view text_checksum) {
  ManifestReading reading = examine_manifest(directory);
  if (!reading.manifest || checksum_text(reading.manifest->text_checksum) != text_checksum) {
    refuse_changed_file(directory / kManifestName, "was replaced while the dump was read");
  }
  return std::move(*reading.manifest);
}

/// What becomes of a check, and why it failed if it did.
template <class Function>
CheckReply reply_of(const Function& function) {
  try {
    return {ExitCode::done, {}, function()};
  } catch (const Error& error) {
    return {error.code(), error.text(), {}};
  }
}

/// Lets the heap end where its last block ends, so that reading on from there, which elsewhere would find whatever lies
/// behind, is a crash here (docs/reliability.md has figures).
void end_heap_early() {
  ::mallopt(M_TOP_PAD, 0);
  ::mallopt(M_TRIM_THRESHOLD, 0);
  ::malloc_trim(0);
}

/// In a process of its own, which ends.
[[noreturn]] void check_and_exit(DumpReader& dump, std::int32_t rank, int to) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  end_heap_early();
  limit_memory();
  limit_time(dump.directory() / dump.manifest().rank_file_name(rank));
  try {
    const std::string bytes = packed(reply_of([&] { return check_rank(dump, rank); }));
    ::_exit(write_all(to, bytes.data(), bytes.size()) ? 0 : 1);
  } catch (const std::bad_alloc&) {
    ::_exit(kNoMemory);
  }
}

std::string read_to_end(int from) {
  std::string bytes;
  char piece[4096];
  for (;;) {
    const ssize_t got = ::read(from, piece, sizeof piece);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return bytes;
    bytes.append(piece, static_cast<std::size_t>(got));
  }
}

CheckReply no_process(int error_number) {
  return {ExitCode::resources,
          {.where = "the process that reads rank files",
           .found = fmt::format("cannot be started: {}", std::strerror(error_number)),
           .expected = {},
           .advice = "--no-isolate reads them in one process"},
          {}};
}

/// What a process that checked the rank left, and how it ended.
IsolatedCheck check_apart(DumpReader& dump, std::int32_t rank) {
  std::array<int, 2> pipe{};
  if (::pipe2(pipe.data(), O_CLOEXEC) != 0) return {0, packed(no_process(errno))};
  const pid_t process = ::fork();
  if (process == 0) check_and_exit(dump, rank, pipe[1]);
  const int error_number = errno;
  ::close(pipe[1]);
  IsolatedCheck check{0, process < 0 ? packed(no_process(error_number)) : read_to_end(pipe[0])};
  ::close(pipe[0]);
  while (process > 0 && ::waitpid(process, &check.status, 0) < 0 && errno == EINTR) {
  }
  return check;
}

}  // namespace

bool is_check_helper(int argc, const char* const* argv) noexcept {
  return argc == 4 && std::string_view(argv[1]) == kHelperCommand;
}

int serve_rank_checks(const char* const* argv) {
  const std::filesystem::path directory = argv[2];
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_FSIZE, 0);
  std::optional<DumpReader> dump;
  const CheckReply opened = reply_of([&] {
    dump.emplace(directory, read_again(directory, argv[3]));
    return RankCheck{};
  });
  std::int32_t rank = 0;
  while (read_all(STDIN_FILENO, &rank, sizeof rank)) {
    const IsolatedCheck check = dump ? check_apart(*dump, rank) : IsolatedCheck{0, packed(opened)};
    if (!send(STDOUT_FILENO, check)) break;
  }
  return static_cast<int>(ExitCode::done);
}

}  // namespace gradclip
