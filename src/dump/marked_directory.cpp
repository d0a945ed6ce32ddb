#include "gradclip/dump/marked_directory.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/posix_file.hpp"

namespace gradclip {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMarker = ".gradclip-partial";
constexpr const char* kNewMarker = ".gradclip-partial.new";
constexpr std::uint64_t kMostIdentityBytes = 4096;

void write_new_file(const fs::path& path, const std::string& text) {
  const PosixFile file = PosixFile::open_for_writing(path, true);
  file.write(0, text.data(), text.size());
  file.sync();
}

}  // namespace

bool is_marked(const fs::path& directory) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(directory / kMarker, ignored));
}

bool is_marked_or_empty(const fs::path& directory) {
  std::error_code error;
  return fs::is_directory(fs::symlink_status(directory, error)) &&
         (is_marked(directory) || fs::is_empty(directory, error));
}

std::string marked_identity(const fs::path& directory) {
  try {
    const PosixFile file = PosixFile::open_for_reading(directory / kMarker);
    std::string text(std::min(file.size(), kMostIdentityBytes), '\0');
    file.read(0, text.data(), text.size());
    return text;
  } catch (const Error&) {
    return {};
  }
}

void mark_directory(const fs::path& directory, const std::string& identity) {
  if (!is_marked(directory)) return write_new_file(directory / kMarker, identity);
  if (marked_identity(directory) == identity) return;
  std::error_code ignored;
  fs::remove(directory / kNewMarker, ignored);
  write_new_file(directory / kNewMarker, identity);
  if (::rename((directory / kNewMarker).c_str(), (directory / kMarker).c_str()) != 0) {
    throw system_error(directory / kMarker, "write", errno);
  }
}

void remove_entries(const fs::path& directory, std::error_code& error,
                    const std::function<bool(const fs::path&)>& is_kept) {
  std::vector<fs::path> paths;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename() != kMarker && !is_kept(entry->path())) paths.push_back(entry->path());
  }
  for (const fs::path& path : paths) {
    if (!error) fs::remove_all(path, error);
  }
}

void empty_marked(const fs::path& directory, std::error_code& error) {
  remove_entries(directory, error, [](const fs::path&) { return false; });
}

void remove_marked(const fs::path& directory) {
  std::error_code error;
  for (int attempt = 0; attempt < 3; ++attempt) {  // another process of the run may be at it too
    error.clear();
    empty_marked(directory, error);
    if (!error) break;
  }
  if (!error) fs::remove(directory / kMarker, error);
  if (!error) fs::remove(directory, error);
}

}  // namespace gradclip
