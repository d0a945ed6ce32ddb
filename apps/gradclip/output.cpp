#include "output.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <ostream>
#include <set>
#include <system_error>
#include <utility>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

/// A file as messages call it: "report 'FILE'".
struct Named {
  std::string_view what;
  const std::filesystem::path& path;
};

[[noreturn]] void fail(const Named& file, std::string_view doing, int error_number) {
  throw Error(ExitCode::resources,
              {.where = std::string(file.what) + " " + gradclip::quoted(file.path.string()),
               .found = "cannot " + std::string(doing) + ": " + std::generic_category().message(error_number),
               .expected = {},
               .advice = {}});
}

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

/// Temporary files that are being written. The mutex is held while one appears or changes its name.
struct Unfinished {
  std::mutex mutex;
  std::set<std::filesystem::path> paths;
};
Unfinished& unfinished() {
  static Unfinished one;
  return one;
}

/// A file that no other run has open; one that a killed run left behind is emptied.
int open_alone(const std::filesystem::path& path, const Named& named) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor < 0) fail(named, "create", errno);
    if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      ::close(descriptor);
      break;
    }
    struct stat open {};
    struct stat there {};
    const bool mine = ::fstat(descriptor, &open) == 0 && ::lstat(path.c_str(), &there) == 0 &&
                      open.st_ino == there.st_ino && open.st_dev == there.st_dev;
    if (mine && ::ftruncate(descriptor, 0) == 0) return descriptor;
    ::close(descriptor);  // another run has just put it in place
  }
  fail(named, "write while another run does", EBUSY);
}

/// Closes, and removes the file unless it was kept.
class NewFile {
 public:
  NewFile(std::filesystem::path path, const Named& named) : path_(std::move(path)) {
    const std::lock_guard<std::mutex> lock(unfinished().mutex);
    const auto place = unfinished().paths.insert(path_).first;
    try {
      descriptor_ = open_alone(path_, named);
    } catch (...) {
      unfinished().paths.erase(place);
      throw;
    }
  }
  ~NewFile() {
    const std::lock_guard<std::mutex> lock(unfinished().mutex);
    unfinished().paths.erase(path_);
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!kept_) ::unlink(path_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  /// @return whether it has its name now.
  [[nodiscard]] bool rename_to(const std::filesystem::path& target) noexcept {
    const std::lock_guard<std::mutex> lock(unfinished().mutex);
    kept_ = ::rename(path_.c_str(), target.c_str()) == 0;
    return kept_;
  }

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  bool kept_ = false;
};

void fill(int descriptor, const Named& named, const std::function<void(std::ostream&)>& write) {
  DescriptorBuffer buffer(descriptor);
  std::ostream out(&buffer);
  out.exceptions(std::ios::badbit);
  try {
    write(out);
    out.flush();
  } catch (const std::system_error& error) {
    fail(named, "write", error.code().value());
  }
}

}  // namespace

DescriptorBuffer::DescriptorBuffer(int descriptor) : descriptor_(descriptor) {
  setp(buffer_.data(), buffer_.data() + buffer_.size());
}

DescriptorBuffer::int_type DescriptorBuffer::overflow(int_type character) {
  sync();
  if (!traits_type::eq_int_type(character, traits_type::eof())) {
    *pptr() = traits_type::to_char_type(character);
    pbump(1);
  }
  return traits_type::not_eof(character);
}

int DescriptorBuffer::sync() {
  const auto waiting = static_cast<std::size_t>(pptr() - pbase());
  setp(buffer_.data(), buffer_.data() + buffer_.size());
  write_out(buffer_.data(), waiting);
  return 0;
}

std::streamsize DescriptorBuffer::xsputn(const char* text, std::streamsize size) {
  if (size > epptr() - pptr()) sync();
  if (size > epptr() - pptr()) {
    write_out(text, static_cast<std::size_t>(size));
  } else {
    traits_type::copy(pptr(), text, static_cast<std::size_t>(size));
    pbump(static_cast<int>(size));
  }
  return size;
}

void DescriptorBuffer::write_out(const char* text, std::size_t size) {
  while (size != 0) {
    const ssize_t written = ::write(descriptor_, text, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw std::system_error(errno, std::generic_category());
    text += written;
    size -= static_cast<std::size_t>(written);
  }
}

std::filesystem::path resolved_path(const std::filesystem::path& path, std::error_code& error) {
  constexpr int kMostLinks = 40;  // as many as Linux follows
  // Absolute first: a new file's bare name would stay bare, and have no directory.
  std::filesystem::path file = std::filesystem::absolute(path, error);
  std::error_code ignored;
  for (int links = 0; links < kMostLinks && !std::filesystem::exists(file, ignored); ++links) {
    const std::filesystem::path target = std::filesystem::read_symlink(file, ignored);
    if (ignored) break;  // it is no link
    file = file.parent_path() / target;
  }
  std::filesystem::path resolved = std::filesystem::weakly_canonical(file, error);
  if (!error || !std::filesystem::exists(file, ignored)) return resolved;
  error.clear();  // a link of /proc to a pipe, which has no path
  return file;
}

void write_whole_file(const std::filesystem::path& path, const std::function<void(std::ostream&)>& write,
                      std::string_view what) {
  const Named named{what, path};
  std::error_code ignored;
  std::filesystem::path target = resolved_path(path, ignored);
  if (ignored) target = path;
  const std::filesystem::file_type type = std::filesystem::status(target, ignored).type();
  if (type != std::filesystem::file_type::regular && type != std::filesystem::file_type::not_found) {
    const Descriptor device{::open(target.c_str(), O_WRONLY | O_CLOEXEC)};
    if (device.number < 0) fail(named, "open", errno);
    return fill(device.number, named, write);
  }
  std::filesystem::path temporary = target;
  temporary.replace_filename("." + target.filename().string() + ".gradclip-tmp");
  NewFile file(temporary, named);
  fill(file.descriptor(), named, write);
  if (::fsync(file.descriptor()) != 0 && errno != EINVAL) fail(named, "write", errno);
  if (!file.rename_to(target)) fail(named, "rename", errno);
}

void discard_unfinished_files() noexcept {
  unfinished().mutex.lock();  // for good: no file appears or changes its name any more
  for (const std::filesystem::path& path : unfinished().paths) ::unlink(path.c_str());
}

}  // namespace gradclip
