#include "gradclip/dump/posix_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>
#include <utility>

namespace gradclip {
namespace {

/// Linux moves at most this many bytes in one call.
constexpr std::size_t kMaxTransfer = 0x7ffff000;
/// Most that is written in one call: of more, page caches are filled with larger pieces of memory than are at hand.
constexpr std::size_t kMaxWritten = std::size_t{512} << 10;

template <class Call>
auto uninterrupted(Call&& call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

bool is_of_the_file(int error_number) noexcept {
  return error_number == EACCES || error_number == EPERM || error_number == EIO;
}

ExitCode code_of(int error_number) noexcept {
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      return ExitCode::bad_input;
    default:
      return ExitCode::resources;
  }
}

}  // namespace

Error system_error(const std::filesystem::path& path, const std::string& doing, int error_number) {
  std::string advice;
  if (error_number == ENOSPC || error_number == EDQUOT) advice = "free some space or choose another place";
  if (error_number == EMFILE || error_number == ENFILE) advice = "raise the limit of open files (ulimit -n)";
  return Error(code_of(error_number),
               {.where = path.string(),
                .found = fmt::format("cannot {}: {}", doing, std::generic_category().message(error_number)),
                .expected = {},
                .advice = advice,
                .kind = is_of_the_file(error_number) ? kUnreadable : ""});
}

PosixFile::~PosixFile() {
  close();
}
PosixFile::PosixFile(PosixFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}
PosixFile& PosixFile::operator=(PosixFile&& other) noexcept {
  close();
  descriptor_ = std::exchange(other.descriptor_, -1);
  path_ = std::move(other.path_);
  return *this;
}

void PosixFile::close() noexcept {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

PosixFile PosixFile::open_for_reading(const std::filesystem::path& path) {
  const int descriptor = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
  if (descriptor < 0) throw system_error(path, "open", errno);
  PosixFile file(descriptor, path);
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) throw system_error(path, "stat", errno);
  if (!S_ISREG(status.st_mode)) {
    throw Error(ExitCode::bad_input, {.where = path.string(),
                                      .found = S_ISDIR(status.st_mode) ? "is a directory" : "is a special file",
                                      .expected = "a regular file",
                                      .advice = {}});
  }
  return file;
}

PosixFile PosixFile::open_for_writing(const std::filesystem::path& path, bool create) {
  const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT | O_EXCL : 0);
  const int descriptor = uninterrupted([&] { return ::open(path.c_str(), flags, 0666); });
  if (descriptor < 0) throw system_error(path, create ? "create" : "open for writing", errno);
  return {descriptor, path};
}

std::uint64_t PosixFile::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) throw system_error(path_, "stat", errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void PosixFile::fail_at_end(std::uint64_t offset) const {
  throw Error(ExitCode::bad_input,
              {.where = path_.string(),
               .found = fmt::format("ends at byte {}", size()),
               .expected = fmt::format("data at byte {}", offset),
               .advice = "the file is truncated, or was changed while it was read; copy or record it again",
               .kind = "unfinished"});
}

std::size_t PosixFile::read_some(std::uint64_t offset, void* to, std::size_t count) const {
  const ssize_t got = uninterrupted(
      [&] { return ::pread(descriptor_, to, std::min(count, kMaxTransfer), static_cast<off_t>(offset)); });
  if (got < 0) throw system_error(path_, "read", errno);
  return static_cast<std::size_t>(got);
}

void PosixFile::read(std::uint64_t offset, void* to, std::size_t count) const {
  auto* target = static_cast<std::byte*>(to);
  while (count != 0) {
    const std::size_t got = read_some(offset, target, count);
    if (got == 0) fail_at_end(offset);
    offset += got;
    target += got;
    count -= got;
  }
}

void PosixFile::read(std::uint64_t offset, std::vector<Target> targets) const {
  std::vector<iovec> vectors;
  std::size_t first = 0;
  while (first < targets.size()) {
    vectors.clear();
    std::size_t total = 0;
    for (std::size_t i = first; i < targets.size() && vectors.size() < IOV_MAX && total < kMaxTransfer; ++i) {
      const std::size_t count = std::min(targets[i].count, kMaxTransfer - total);
      vectors.push_back({targets[i].to, count});
      total += count;
    }
    const ssize_t got = uninterrupted([&] {
      return ::preadv(descriptor_, vectors.data(), static_cast<int>(vectors.size()), static_cast<off_t>(offset));
    });
    if (got < 0) throw system_error(path_, "read", errno);
    if (got == 0 && total != 0) fail_at_end(offset);
    offset += static_cast<std::uint64_t>(got);
    auto left = static_cast<std::size_t>(got);
    while (first < targets.size() && targets[first].count <= left) left -= targets[first++].count;
    if (left != 0) {
      targets[first].to = static_cast<std::byte*>(targets[first].to) + left;
      targets[first].count -= left;
    }
  }
}

void PosixFile::write(std::uint64_t offset, const void* from, std::size_t count) const {
  const auto* source = static_cast<const std::byte*>(from);
  while (count != 0) {
    const ssize_t put = uninterrupted(
        [&] { return ::pwrite(descriptor_, source, std::min(count, kMaxWritten), static_cast<off_t>(offset)); });
    if (put < 0) throw system_error(path_, "write", errno);
    offset += static_cast<std::uint64_t>(put);
    source += put;
    count -= static_cast<std::size_t>(put);
  }
}

void PosixFile::allocate(std::uint64_t offset, std::uint64_t count) const {
  if (count == 0) return;
  int error = 0;
  do {
    error = ::posix_fallocate(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(count));
  } while (error == EINTR);
  if (error != 0) throw system_error(path_, fmt::format("allocate {} bytes", count), error);
}

void PosixFile::start_write_back(std::uint64_t offset, std::uint64_t count) const noexcept {
  ::sync_file_range(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(count), SYNC_FILE_RANGE_WRITE);
}

void PosixFile::sync() const {
  if (uninterrupted([&] { return ::fsync(descriptor_); }) != 0) throw system_error(path_, "sync", errno);
}

void sync_directory(const std::filesystem::path& directory) {
  const int descriptor = uninterrupted([&] { return ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (descriptor < 0) throw system_error(directory, "open", errno);
  const int result = uninterrupted([&] { return ::fsync(descriptor); });
  const int error = errno;
  ::close(descriptor);
  // Some network file systems cannot sync directories, and say so with EINVAL.
  if (result != 0 && error != EINVAL) throw system_error(directory, "sync", error);
}

}  // namespace gradclip
