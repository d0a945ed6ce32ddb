#pragma once
// Files by descriptor: what HDF5 and the standard streams do not offer. Interrupted and short calls are continued here.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/base/error.hpp"

namespace gradclip {

/// ErrorText::kind of what cannot be read. Of an Error(resources) too, where the file is to blame (no permission, a
/// medium that fails) and not a limit of the process.
inline constexpr std::string_view kUnreadable = "unreadable";

/// An error of the system: "PATH: cannot DO: REASON". ENOENT, ENOTDIR, EISDIR, ELOOP and ENAMETOOLONG are bad input,
/// the others (permission, space, descriptors, input/output) resources; permission and input/output are kUnreadable.
[[nodiscard]] Error system_error(const std::filesystem::path& path, const std::string& doing, int error_number);

/// A regular file that is open; closes itself.
class PosixFile {
 public:
  PosixFile() = default;
  ~PosixFile();
  PosixFile(PosixFile&& other) noexcept;
  PosixFile& operator=(PosixFile&& other) noexcept;

  /// Errors: as system_error(); Error(bad_input) for anything but a regular file (a pipe is not waited for).
  [[nodiscard]] static PosixFile open_for_reading(const std::filesystem::path& path);
  /// @param create  makes the file, which must not exist; else it must.
  [[nodiscard]] static PosixFile open_for_writing(const std::filesystem::path& path, bool create);

  [[nodiscard]] bool is_open() const noexcept { return descriptor_ >= 0; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::uint64_t size() const;
  void close() noexcept;

  /// As many bytes as there are up to `count`; 0 at the end of the file.
  [[nodiscard]] std::size_t read_some(std::uint64_t offset, void* to, std::size_t count) const;
  /// Exactly `count` bytes. Errors: Error(bad_input) if the file ends before.
  void read(std::uint64_t offset, void* to, std::size_t count) const;

  /// Memory that a run of bytes is spread over.
  struct Target {
    void* to;
    std::size_t count;
  };
  /// Fills the targets from consecutive bytes at `offset`, in as few calls as IOV_MAX allows. Errors: as read().
  void read(std::uint64_t offset, std::vector<Target> targets) const;

  void write(std::uint64_t offset, const void* from, std::size_t count) const;
  /// Errors: Error(resources) if there is no space.
  void allocate(std::uint64_t offset, std::uint64_t count) const;
  /// Lets the kernel begin to write these bytes to the device, so that a later sync() is short. A hint.
  void start_write_back(std::uint64_t offset, std::uint64_t count) const noexcept;
  void sync() const;

 private:
  PosixFile(int descriptor, std::filesystem::path path) : descriptor_(descriptor), path_(std::move(path)) {}
  [[noreturn]] void fail_at_end(std::uint64_t offset) const;

  int descriptor_ = -1;
  std::filesystem::path path_;
};

/// Makes the entries of a directory durable.
void sync_directory(const std::filesystem::path& directory);

}  // namespace gradclip
