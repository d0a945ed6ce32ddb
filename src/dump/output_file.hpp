#pragma once
// A file that several threads write by position.

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "gradclip/dump/posix_file.hpp"

namespace gradclip {

/// Its threads write one at a time: file systems lock a file for that, and whoever waits for the file system spins, on
/// a processor that the others could use. Write-back begins while the rest is being written, so that syncing is short.
class OutputFile {
 public:
  explicit OutputFile(PosixFile file) noexcept : file_(std::move(file)) {}

  /// Thread-safe. Errors: as PosixFile::write.
  void write(std::uint64_t offset, const void* from, std::size_t count);
  /// As PosixFile. At rest.
  void allocate(std::uint64_t offset, std::uint64_t count) const { file_.allocate(offset, count); }
  void sync() const { file_.sync(); }

 private:
  PosixFile file_;
  std::mutex mutex_;
  std::uint64_t written_begin_ = 0;  ///< what write-back was not started for
  std::uint64_t written_end_ = 0;
};

}  // namespace gradclip
