#pragma once
// A rank file's metadata is read by the HDF5 library, which was not written for files that somebody damaged on purpose:
// a process of its own reads it, so that what the library does to that process is one fault of the dump.

#include <sys/types.h>

#include <cstdint>
#include <filesystem>

#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/verify/rank_check.hpp"

namespace gradclip {

/// The most helpers of one process that work side by side: each reads the manifest and holds it.
inline constexpr std::size_t kMostHelpers = 4;

/// What the first word of the command line is in a helper; then come the dump and its manifest's text_checksum.
inline constexpr char kHelperCommand[] = "--check-rank-files";

/// check_rank() in another process. A helper, which is this very program, is started when it is first needed; it forks
/// for each file. Each of a process's threads has a helper of its own.
///
/// The process that reads a file may use 1 GiB of memory beyond what it begins with and a processor time that grows
/// with the file, writes no file, and has no descriptors but its pipes. That guards against the library's mistakes, not
/// against code that a file brings it to run: the process has the user's rights.
class CheckHelper {
 public:
  explicit CheckHelper(DumpReader& dump) : dump_(dump) {}
  ~CheckHelper() { stop(); }
  CheckHelper(const CheckHelper&) = delete;
  CheckHelper& operator=(const CheckHelper&) = delete;

  /// As check_rank(), whose errors it passes on; where the process came to an end the file is not readable, and a fault
  /// says how it ended. Errors: Error(resources) too if no process can be started.
  [[nodiscard]] RankCheck check(std::int32_t rank);

 private:
  void start();
  /// @return how the helper ended
  int stop() noexcept;

  DumpReader& dump_;
  pid_t process_ = -1;
  int requests_ = -1;
  int replies_ = -1;
};

/// Whether the command line is a helper's.
[[nodiscard]] bool is_check_helper(int argc, const char* const* argv) noexcept;

/// The helper: checks the ranks whose numbers come on stdin until it closes, results on stdout. @return its exit code
/// @param argv  the helper's
int serve_rank_checks(const char* const* argv);

}  // namespace gradclip
