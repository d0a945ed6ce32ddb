#include "gradclip/dump/dump_writer.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/posix_file.hpp"

namespace gradclip {
namespace {

namespace fs = std::filesystem;

/// Says in an unfinished output that it is one, so that only what gradclip made is ever removed.
constexpr const char* kMarker = ".gradclip-partial";

[[noreturn]] void refuse(const fs::path& path, std::string found, std::string advice) {
  throw Error(
      ExitCode::usage,
      {.where = "output " + path.string(), .found = std::move(found), .expected = {}, .advice = std::move(advice)});
}

bool contains(const fs::path& outer, const fs::path& inner) {
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

/// The output's directory resolved, its own name kept.
fs::path resolved(const fs::path& output) {
  if (output.empty()) refuse(output, "is empty", "name a directory to write");
  fs::path given = output;
  if (!given.has_filename()) given = given.parent_path();  // "out/"
  std::error_code error;
  if (given.filename() == "." || given.filename() == "..") given = fs::canonical(given, error);
  if (error) refuse(output, "cannot be found: " + error.message(), {});
  const fs::path parent = fs::canonical(given.has_parent_path() ? given.parent_path() : ".", error);
  if (error || !fs::is_directory(parent)) {
    refuse(output, "would lie in a directory that does not exist", "make it first");
  }
  return parent / given.filename();
}

bool is_dump(const fs::path& directory) {
  std::error_code error;
  if (!fs::is_directory(fs::symlink_status(directory, error))) return false;
  try {
    const PosixFile file = PosixFile::open_for_reading(directory / kManifestName);
    std::string text(std::min<std::uint64_t>(file.size(), std::uint64_t{1} << 30), '\0');
    file.read(0, text.data(), text.size());
    return text.find("\"gradclip.dump\"") != std::string::npos;
  } catch (const Error&) {
    return false;
  }
}

void refuse_foreign(const fs::path& output) {
  if (!is_dump(output)) {
    refuse(output, "exists and is not a gradclip dump",
           "it will not be replaced; choose another name or remove it yourself");
  }
}

int rename_with(const fs::path& from, const fs::path& to, unsigned flags) {
  return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}

bool not_supported(int error) {
  return error == ENOSYS || error == EINVAL || error == EOPNOTSUPP;
}

void rename_or_throw(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) throw system_error(to, "rename " + from.string() + " to it", errno);
}

void mark(const fs::path& directory) {
  std::error_code error;
  if (fs::exists(fs::symlink_status(directory / kMarker, error))) return;
  static_cast<void>(PosixFile::open_for_writing(directory / kMarker, true));
}

/// Empties a directory that a run left behind; refuses one that gradclip did not make.
void empty_leftover(const fs::path& partial) {
  std::error_code error;
  if (fs::is_empty(partial, error)) return;
  if (!fs::exists(fs::symlink_status(partial / kMarker, error))) {
    refuse(partial, "exists, is not empty and was not made by gradclip", "remove it, or choose another output");
  }
  for (fs::directory_iterator entry(partial, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename() != kMarker) fs::remove_all(entry->path(), error);
  }
  if (error) throw system_error(partial, "remove an unfinished output", error.value());
}

}  // namespace

DumpWriter::DumpWriter(const DumpReader& input, fs::path output, bool overwrite)
    : input_(input), output_(resolved(output)), overwrite_(overwrite) {
  partial_ = output_;
  partial_ += ".partial";
  const fs::path source = fs::canonical(input.directory());
  const fs::path target = fs::weakly_canonical(output_);
  if (source == target) refuse(output, "is the input", "choose another name");
  if (contains(source, target)) refuse(output, "lies inside the input " + source.string(), "choose another place");
  if (contains(target, source)) refuse(output, "contains the input " + source.string(), "choose another place");
  std::error_code error;
  if (fs::exists(fs::symlink_status(output_, error))) {
    if (!overwrite_) refuse(output, "exists", "choose another name, or give --overwrite to replace it");
    refuse_foreign(output_);
  }
}

DumpWriter::~DumpWriter() {
  if (lock_ >= 0 && !finished_) discard();
  if (lock_ >= 0) ::close(lock_);
}

void DumpWriter::prepare() {
  const bool made = ::mkdir(partial_.c_str(), 0777) == 0;
  if (!made && errno != EEXIST) throw system_error(partial_, "create", errno);
  const int descriptor = ::open(partial_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor < 0) throw system_error(partial_, "open", errno);
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(descriptor);
    throw Error(ExitCode::resources, {.where = partial_.string(),
                                      .found = "another run is writing it",
                                      .expected = {},
                                      .advice = "wait for it, or choose another output"});
  }
  try {
    if (!made) empty_leftover(partial_);
    mark(partial_);
  } catch (...) {
    if (made) ::rmdir(partial_.c_str());
    ::close(descriptor);
    throw;
  }
  lock_ = descriptor;
  touched_ = true;
}

std::unique_ptr<RankFileWriter> DumpWriter::begin(std::shared_ptr<const RankFile> input) {
  touched_ = true;
  const fs::path path = partial_ / input_.manifest().rank_file_name(input->rank());
  return std::make_unique<RankFileWriter>(path, std::move(input), input_.manifest());
}

void DumpWriter::finish(const ManifestChanges& changes) {
  GRADCLIP_CHECK(lock_ >= 0, "an output that was not prepared by this process");
  const std::string text = rewritten_manifest(input_.directory(), changes);
  {
    const PosixFile manifest = PosixFile::open_for_writing(partial_ / kManifestName, true);
    manifest.write(0, text.data(), text.size());
    manifest.sync();
  }
  sync_directory(partial_);
  publish();
  finished_ = true;
  // Only now, so that a run that ends before it leaves nothing that the next one dares not remove.
  std::error_code ignored;
  fs::remove(output_ / kMarker, ignored);
  sync_directory(output_);
  sync_directory(output_.parent_path());
}

void DumpWriter::publish() {
  int error = rename_with(partial_, output_, RENAME_NOREPLACE);
  if (error == 0) return;
  std::error_code ignored;
  const bool exists = fs::exists(fs::symlink_status(output_, ignored));
  if (!exists && not_supported(error)) return rename_or_throw(partial_, output_);
  if (!exists) throw system_error(output_, "rename " + partial_.string() + " to it", error);
  if (!overwrite_) refuse(output_, "was made by somebody else in the meantime", "choose another name");
  refuse_foreign(output_);
  error = rename_with(partial_, output_, RENAME_EXCHANGE);
  fs::path old = partial_;
  if (not_supported(error)) {
    old = output_;
    old += ".replaced";
    rename_or_throw(output_, old);
    rename_or_throw(partial_, output_);
  } else if (error != 0) {
    throw system_error(output_, "exchange it with " + partial_.string(), error);
  }
  mark(old);
  fs::remove_all(old, ignored);
}

void DumpWriter::discard() noexcept {
  if (!touched_ || finished_) return;
  try {
    std::error_code ignored;
    fs::remove_all(partial_, ignored);
  } catch (...) {  // out of memory while removing: the next run removes it
  }
}

}  // namespace gradclip
