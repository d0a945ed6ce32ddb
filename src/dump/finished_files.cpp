#include "gradclip/dump/finished_files.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>
#include <system_error>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/posix_file.hpp"

namespace gradclip {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMostNoteBytes = std::uint64_t{1} << 20;

/// Empty if there is none, or it cannot be read.
std::string text_of(const fs::path& path) {
  try {
    const PosixFile file = PosixFile::open_for_reading(path);
    std::string text(std::min(file.size(), kMostNoteBytes), '\0');
    file.read(0, text.data(), text.size());
    return text;
  } catch (const Error&) {
    return {};
  }
}

/// Takes the first line off.
std::string_view take_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

}  // namespace

fs::path finished_files_directory(const fs::path& partial) {
  return partial / "finished";
}

// Four lines: the checksum of the others, bytes, the file's checksum, the note.

void note_finished_file(const fs::path& partial, const std::string& name, const FinishedFile& file) {
  const fs::path directory = finished_files_directory(partial);
  if (::mkdir(directory.c_str(), 0777) != 0 && errno != EEXIST) throw system_error(directory, "create", errno);
  const std::string facts =
      fmt::format("{}\n{}\n{}\n", file.record.bytes, checksum_text(file.record.xxh3_64.value_or(0)), file.note);
  const std::string text = checksum_text(xxh3_64(facts.data(), facts.size())) + "\n" + facts;
  std::error_code ignored;
  fs::remove(directory / name, ignored);  // of a file that was made anew
  const PosixFile note = PosixFile::open_for_writing(directory / name, true);
  note.write(0, text.data(), text.size());
  note.sync();
}

std::optional<FinishedFile> finished_file(const fs::path& partial, const fs::path& made, const std::string& name) {
  const std::string text = text_of(finished_files_directory(partial) / name);
  std::string_view rest = text;
  const std::optional<std::uint64_t> own = parse_checksum(take_line(rest));
  if (!own || *own != xxh3_64(rest.data(), rest.size())) return std::nullopt;
  FinishedFile file;
  const std::string_view bytes = take_line(rest);
  std::from_chars(bytes.data(), bytes.data() + bytes.size(), file.record.bytes);
  file.record.xxh3_64 = parse_checksum(take_line(rest));
  file.note = take_line(rest);
  std::error_code error;
  if (!fs::is_regular_file(fs::symlink_status(made / name, error))) return std::nullopt;
  if (fs::file_size(made / name, error) != file.record.bytes || error) return std::nullopt;
  if (checksum_of_file(made / name).xxh3_64 != file.record.xxh3_64) return std::nullopt;
  return file;
}

}  // namespace gradclip
