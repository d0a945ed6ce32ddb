#include "gradclip/dump/text_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "gradclip/dump/posix_file.hpp"

namespace gradclip {
namespace {

/// With the code of the file's kind where it is the user's to choose another file.
[[noreturn]] void fail(const std::string& where, const char* doing, int error_number, ExitCode code) {
  const Error error = system_error(where, doing, error_number);
  throw Error(error.code() == ExitCode::bad_input ? code : error.code(), error.text());
}

}  // namespace

std::string read_text_file(const std::filesystem::path& file, const std::string& where, ExitCode code,
                           std::size_t most_bytes) {
  struct Descriptor {
    int number;
    ~Descriptor() {
      if (number >= 0) ::close(number);
    }
  };
  const Descriptor descriptor{::open(file.c_str(), O_RDONLY | O_CLOEXEC)};
  if (descriptor.number < 0) fail(where, "open", errno, code);
  struct stat status {};
  if (::fstat(descriptor.number, &status) != 0) fail(where, "stat", errno, code);
  if (S_ISDIR(status.st_mode)) {
    throw Error(code, {.where = where, .found = "is a directory", .expected = "a file", .advice = {}});
  }
  const auto refuse_size = [&] {
    throw Error(
        code,
        {.where = where, .found = fmt::format("has more than {} bytes", most_bytes), .expected = {}, .advice = {}});
  };
  const auto told = static_cast<std::size_t>(status.st_size);  // 0 for pipes and devices
  if (told > most_bytes) refuse_size();
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  // One byte more than there should be finds the end in the first call.
  const std::size_t expected = told + 1;
  std::string text;
  for (std::size_t size = 0;;) {
    text.resize(std::max(size + kPiece, expected));
    const ssize_t got = ::read(descriptor.number, text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(where, "read", errno, code);
    size += static_cast<std::size_t>(got);
    if (size > most_bytes) refuse_size();
    if (got == 0) {
      text.resize(size);
      return text;
    }
  }
}

}  // namespace gradclip
