#include "gradclip/dump/partial_output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/dump/safetensors_file.hpp"

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

/// As system_error(), but a name that cannot be is a mistake on the command line, not in the input.
Error output_error(const fs::path& path, const std::string& doing, int error_number) {
  Error error = system_error(path, doing, error_number);
  return error.code() == ExitCode::bad_input ? Error(ExitCode::usage, error.text()) : error;
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
  const bool exists = !error && fs::is_directory(parent, error);
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory) {
    refuse(output, "would lie in a directory that cannot be found: " + error.message(), {});
  }
  if (!exists) refuse(output, "would lie in a directory that does not exist", "make it first");
  return parent / given.filename();
}

/// Refuses an output of which `place`, itself or a stand-in, is the input, lies inside it or contains it.
/// @param source  the input, canonical.
void refuse_overlap(const fs::path& output, const fs::path& source, const fs::path& place) {
  std::error_code error;
  const fs::path target = fs::weakly_canonical(place, error);
  if (error) refuse(place, "cannot be used: " + error.message(), "choose another name");
  const std::string subject =
      place == output ? std::string() : "is " + place.filename().string() + " while it is written, which ";
  const std::string input = " the input " + source.string();
  if (source == target) refuse(output, subject + "is" + input, "choose another name");
  if (contains(source, target)) refuse(output, subject + "lies inside" + input, "choose another place");
  if (contains(target, source)) refuse(output, subject + "contains" + input, "choose another place");
}

/// A directory beside the output that holds the new or the old one while they change places.
fs::path stand_in(const fs::path& output, const char* suffix) {
  fs::path place = output;
  place += suffix;
  return place;
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

void refuse_foreign(const fs::path& output, OutputKind kind) {
  const bool ours = kind == OutputKind::dump ? is_dump(output) : is_safetensors_file(output);
  if (ours) return;
  refuse(output, fmt::format("exists and is not a {}", kind == OutputKind::dump ? "gradclip dump" : "safetensors file"),
         "it will not be replaced; choose another name or remove it yourself");
}

int rename_with(const fs::path& from, const fs::path& to, unsigned flags) {
  return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}

bool not_supported(int error) {
  return error == ENOSYS || error == EINVAL || error == EOPNOTSUPP;
}

void rename_or_throw(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) throw output_error(to, "rename " + from.string() + " to it", errno);
}

/// Where there is no exchange: the old output is put aside, and put back if the new one cannot take its place.
void replace(const fs::path& output, const fs::path& partial, const fs::path& aside) {
  rename_or_throw(output, aside);
  try {
    rename_or_throw(partial, output);
  } catch (const Error& error) {
    if (::rename(aside.c_str(), output.c_str()) == 0) throw;
    ErrorText text = error.text();
    text.advice = "what was there is now " + aside.string();
    throw Error(error.code(), std::move(text));
  }
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
  std::vector<fs::path> names;
  for (fs::directory_iterator entry(partial, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename() != kMarker) names.push_back(entry->path());
  }
  for (const fs::path& path : names) {
    if (!error) fs::remove_all(path, error);
  }
  if (error) throw output_error(partial, "remove an unfinished output", error.value());
}

/// Removes an output that this run has replaced. What cannot be removed stays; marked, so that a later run dares to.
void remove_replaced(const fs::path& old) {
  try {
    mark(old);
  } catch (const Error&) {  // the new output is in its place all the same
  }
  std::error_code ignored;
  fs::remove_all(old, ignored);
}

}  // namespace

PartialOutput::PartialOutput(const fs::path& input, fs::path output, bool overwrite, OutputKind kind)
    : kind_(kind), output_(resolved(output)), partial_(stand_in(output_, ".partial")), overwrite_(overwrite) {
  std::error_code error;
  if (!input.empty()) {
    const fs::path source = fs::canonical(input, error);
    if (error) throw system_error(input, "find", error.value());
    refuse_overlap(output_, source, output_);
    refuse_overlap(output_, source, partial_);
    if (overwrite_) refuse_overlap(output_, source, stand_in(output_, ".replaced"));
  }
  if (fs::exists(fs::symlink_status(output_, error))) {
    if (!overwrite_) refuse(output, "exists", "choose another name, or give --overwrite to replace it");
    refuse_foreign(output_, kind_);
  }
}

PartialOutput::~PartialOutput() {
  if (lock_ >= 0 && !finished_) discard();
  if (lock_ >= 0) ::close(lock_);
}

void PartialOutput::prepare() {
  const bool made = ::mkdir(partial_.c_str(), 0777) == 0;
  if (!made && errno != EEXIST) throw output_error(partial_, "create", errno);
  const int descriptor = ::open(partial_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor < 0) throw output_error(partial_, "open", errno);
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

void PartialOutput::sign(const std::string& signature) {
  PosixFile::open_for_writing(partial_ / kMarker, false).write(0, signature.data(), signature.size());
}

bool PartialOutput::is_signed(const std::string& signature) const noexcept {
  try {
    const PosixFile marker = PosixFile::open_for_reading(partial_ / kMarker);
    std::string found(std::min<std::uint64_t>(marker.size(), signature.size() + 1), '\0');
    marker.read(0, found.data(), found.size());
    return found == signature;
  } catch (...) {
    return false;
  }
}

void PartialOutput::publish() {
  GRADCLIP_CHECK(lock_ >= 0, "an output that was not prepared by this process");
  fs::path old;
  try {
    sync_directory(partial_);
    if (kind_ == OutputKind::file) {
      publish_file();
    } else {
      old = publish_directory();
    }
  } catch (const Error&) {
    rethrow_unless_given_up(partial_);
  }
  finished_ = true;
  std::error_code ignored;
  if (kind_ == OutputKind::file) {
    fs::remove_all(partial_, ignored);
  } else {
    replaced_ = !old.empty();
    if (replaced_) remove_replaced(old);
    // Only now, so that a run that ends before it leaves nothing that the next one dares not remove.
    fs::remove(output_ / kMarker, ignored);
    sync_directory(output_);
  }
  sync_directory(output_.parent_path());
}

void PartialOutput::publish_file() {
  const fs::path made = file();
  int error = rename_with(made, output_, RENAME_NOREPLACE);
  if (error == 0) return;
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(output_, ignored))) {
    if (!overwrite_) refuse(output_, "was made by somebody else in the meantime", "choose another name");
    refuse_foreign(output_, kind_);
  } else if (!not_supported(error)) {
    throw output_error(output_, "rename " + made.string() + " to it", error);
  }
  rename_or_throw(made, output_);
}

fs::path PartialOutput::publish_directory() {
  int error = rename_with(partial_, output_, RENAME_NOREPLACE);
  if (error == 0) return {};
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(output_, ignored))) {
    if (!not_supported(error)) throw output_error(output_, "rename " + partial_.string() + " to it", error);
    rename_or_throw(partial_, output_);
    return {};
  }
  if (!overwrite_) refuse(output_, "was made by somebody else in the meantime", "choose another name");
  refuse_foreign(output_, kind_);
  error = rename_with(partial_, output_, RENAME_EXCHANGE);
  if (error == 0) return partial_;
  if (!not_supported(error)) throw output_error(output_, "exchange it with " + partial_.string(), error);
  fs::path aside = stand_in(output_, ".replaced");
  replace(output_, partial_, aside);
  return aside;
}

void PartialOutput::withdraw() noexcept {
  if (!finished_ || replaced_) return;
  std::error_code ignored;
  // Back under the name of what is unfinished first: then OUT goes in one step.
  if (::rename(output_.c_str(), partial_.c_str()) == 0) fs::remove_all(partial_, ignored);
}

void PartialOutput::discard() noexcept {
  if (!touched_ || finished_) return;
  try {
    // Renamed first, in one step: then no other process makes a file in it while it is being emptied, and all of them
    // notice.
    std::string doomed = partial_.string() + ".XXXXXX";
    std::error_code ignored;
    int error = EIO;
    if (::mkdtemp(doomed.data()) != nullptr) {
      error = ::rename(partial_.c_str(), doomed.c_str()) == 0 ? 0 : errno;
      fs::remove_all(doomed, ignored);
    }
    // ENOENT: another process was faster. Else there is no such name, and it is removed where it is.
    if (error != 0 && error != ENOENT) fs::remove_all(partial_, ignored);
  } catch (...) {  // out of memory while removing: the next run removes it
  }
}

void rethrow_unless_given_up(const fs::path& partial) {
  try {
    throw;
  } catch (const Error& error) {
    std::error_code ignored;
    const bool discarded = fs::symlink_status(partial / kMarker, ignored).type() == fs::file_type::not_found;
    const bool of_files = error.code() == ExitCode::resources || error.code() == ExitCode::bad_input;
    if (!discarded || !of_files) throw;
  }
  // A consequence of another process's failure, which has the last word on the exit code: when processes agree on one,
  // usage ranks below whatever ends a run that has begun to write.
  throw Error(ExitCode::usage, {.where = partial.string(),
                                .found = "another process has given up the run and removed it",
                                .expected = {},
                                .advice = {}});
}

}  // namespace gradclip
