#include "gradclip/dump/partial_output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/finished_files.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/dump/marked_directory.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/dump/safetensors_file.hpp"

namespace gradclip {
namespace {

namespace fs = std::filesystem;

constexpr int kMostAttempts = 100;  // to lock a directory that others are putting in place and removing

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
void replace(const fs::path& output, const fs::path& made, const fs::path& aside) {
  rename_or_throw(output, aside);
  try {
    rename_or_throw(made, output);
  } catch (const Error& error) {
    if (::rename(aside.c_str(), output.c_str()) == 0) throw;
    ErrorText text = error.text();
    text.advice = "what was there is now " + aside.string();
    throw Error(error.code(), std::move(text));
  }
}

/// Removes what a run left behind; refuses what gradclip did not make.
void empty_leftover(const fs::path& partial) {
  if (!is_marked_or_empty(partial)) {
    refuse(partial, "exists, is not empty and was not made by gradclip", "remove it, or choose another output");
  }
  std::error_code error;
  empty_marked(partial, error);
  if (error) throw output_error(partial, "remove an unfinished output", error.value());
}

/// Takes a leftover over: what was not finished goes.
void keep_finished(const PartialOutput& output) {
  std::error_code error;
  remove_entries(output.made(), error, [&](const fs::path& path) {
    return fs::exists(finished_files_directory(output.directory()) / path.filename(), error);
  });
  if (error) throw output_error(output.directory(), "remove what is unfinished in it", error.value());
}

bool is_at(int descriptor, const fs::path& path) {
  struct stat open {};
  struct stat named {};
  return ::fstat(descriptor, &open) == 0 && ::lstat(path.c_str(), &named) == 0 && open.st_dev == named.st_dev &&
         open.st_ino == named.st_ino;
}

int open_directory(const fs::path& path) {
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

[[noreturn]] void refuse_taken(const fs::path& partial) {
  throw Error(ExitCode::resources, {.where = partial.string(),
                                    .found = "another run is writing it",
                                    .expected = {},
                                    .advice = "wait for it, or choose another output"});
}

/// Outputs that this process has touched and that are neither published nor removed. The mutex is held while one is
/// made, too.
struct Unfinished {
  std::mutex mutex;
  std::vector<const PartialOutput*> outputs;
};
Unfinished& unfinished() {
  static Unfinished one;
  return one;
}

}  // namespace

void require_apart(const fs::path& input, const fs::path& output, bool overwrite) {
  std::error_code error;
  const fs::path source = fs::canonical(input, error);
  if (error) throw system_error(input, "find", error.value());
  const fs::path target = resolved(output);
  refuse_overlap(target, source, target);
  refuse_overlap(target, source, stand_in(target, ".partial"));
  refuse_overlap(target, source, stand_in(stand_in(target, ".partial"), ".removed"));
  if (overwrite) refuse_overlap(target, source, stand_in(target, ".replaced"));
}

PartialOutput::PartialOutput(const fs::path& input, const fs::path& output, bool overwrite, OutputKind kind,
                             Leftover leftover)
    : kind_(kind),
      leftover_(leftover),
      output_(resolved(output)),
      partial_(stand_in(output_, ".partial")),
      overwrite_(overwrite) {
  if (!input.empty()) require_apart(input, output_, overwrite_);
  std::error_code error;
  if (fs::exists(fs::symlink_status(output_, error))) {
    if (!overwrite_) {
      const bool nothing_left = leftover_ == Leftover::continued && kind_ == OutputKind::dump && is_dump(output_);
      refuse(output, nothing_left ? "exists and is whole: nothing is left to resume" : "exists",
             "choose another name, or give --overwrite to replace it");
    }
    refuse_foreign(output_, kind_);
  }
}

PartialOutput::~PartialOutput() {
  if (prepared_) discard();
  forget();
  if (lock_ >= 0) ::close(lock_);
}

fs::path PartialOutput::doomed() const {
  return stand_in(partial_, ".removed");
}

/// Alone: this run is the only one that has the directory at the path.
void PartialOutput::take_lock(bool& fresh) {
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    fresh = ::mkdir(partial_.c_str(), 0777) == 0;
    if (!fresh && errno != EEXIST) throw output_error(partial_, "create", errno);
    const int descriptor = open_directory(partial_);
    if (descriptor < 0 && errno == ENOENT) continue;  // removed by its run
    if (descriptor < 0) throw output_error(partial_, "open", errno);
    const bool taken = ::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (!taken && is_at(descriptor, partial_)) {
      lock_ = descriptor;
      return;
    }
    ::close(descriptor);
    if (taken) refuse_taken(partial_);
  }
  refuse_taken(partial_);
}

void PartialOutput::prepare(const std::string& identity) {
  // Who ends the process meanwhile waits: what is made here is either unknown to it or not there yet.
  const std::lock_guard<std::mutex> lock(unfinished().mutex);
  bool fresh = false;
  take_lock(fresh);
  try {
    const bool same = leftover_ == Leftover::continued && !identity.empty() && marked_identity(partial_) == identity;
    std::error_code ignored;
    if (same && fs::is_directory(fs::symlink_status(made(), ignored))) {
      keep_finished(*this);
    } else {
      if (!fresh) empty_leftover(partial_);
      mark_directory(partial_, identity);
      if (kind_ == OutputKind::dump && ::mkdir(made().c_str(), 0777) != 0) throw output_error(made(), "create", errno);
    }
    if (is_marked_or_empty(doomed())) remove_marked(doomed());
  } catch (...) {
    if (fresh) remove_marked(partial_);
    ::close(std::exchange(lock_, -1));
    throw;
  }
  // Shared from now on, with the processes that touch() it. That is no single step: another run may have come between,
  // and the directory is its own then.
  if (::flock(lock_, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(std::exchange(lock_, -1));
    refuse_taken(partial_);
  }
  prepared_ = true;
  remember();
}

void PartialOutput::touch() noexcept {
  const std::lock_guard<std::mutex> lock(unfinished().mutex);
  remember();
}

void PartialOutput::remember() noexcept {
  if (touched_) return;
  touched_ = true;
  if (lock_ < 0) {
    lock_ = open_directory(partial_);
    if (lock_ >= 0) static_cast<void>(::flock(lock_, LOCK_SH | LOCK_NB));
  }
  if (leftover_ == Leftover::continued) return;
  try {
    unfinished().outputs.push_back(this);
  } catch (...) {  // out of memory: the process that prepared it, or the next run, removes it
  }
}

void PartialOutput::forget() noexcept {
  const std::lock_guard<std::mutex> lock(unfinished().mutex);
  std::vector<const PartialOutput*>& outputs = unfinished().outputs;
  outputs.erase(std::remove(outputs.begin(), outputs.end(), this), outputs.end());
}

bool PartialOutput::is_prepared_as(const std::string& identity) const noexcept {
  try {
    return marked_identity(partial_) == identity;
  } catch (...) {
    return false;
  }
}

void PartialOutput::publish() {
  GRADCLIP_CHECK(prepared_, "an output that was not prepared by this process");
  try {
    if (kind_ == OutputKind::dump) sync_directory(made());
    put_in_place();
  } catch (const Error&) {
    rethrow_unless_given_up(made());
  }
  finished_ = true;
  const auto clean = [this] {
    remove_marked(partial_);
    forget();
  };
  try {
    // Before the old output is removed: its name has to be the new one's by then, whatever happens.
    sync_directory(output_.parent_path());
  } catch (const Error&) {
    clean();
    throw;
  }
  clean();
}

void PartialOutput::put_in_place() {
  int error = rename_with(made(), output_, RENAME_NOREPLACE);
  if (error == 0) return;
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(output_, ignored))) {
    if (!not_supported(error)) throw output_error(output_, "rename " + made().string() + " to it", error);
    return rename_or_throw(made(), output_);
  }
  if (!overwrite_) refuse(output_, "was made by somebody else in the meantime", "choose another name");
  refuse_foreign(output_, kind_);
  if (kind_ == OutputKind::file) return rename_or_throw(made(), output_);
  error = rename_with(made(), output_, RENAME_EXCHANGE);
  replaced_ = true;
  if (error == 0) return;
  if (!not_supported(error)) throw output_error(output_, "exchange it with " + made().string(), error);
  const fs::path aside = stand_in(output_, ".replaced");
  replace(output_, made(), aside);
  fs::rename(aside, made(), ignored);  // where it is removed from
}

void PartialOutput::withdraw() noexcept {
  if (!finished_ || replaced_) return;
  std::error_code ignored;
  // Back under the name of what is unfinished first: then OUT goes in one step.
  if (::rename(output_.c_str(), partial_.c_str()) == 0) fs::remove_all(partial_, ignored);
}

void PartialOutput::discard() noexcept {
  if (touched_ && !finished_ && leftover_ != Leftover::continued) remove();
}

void PartialOutput::remove() const noexcept {
  try {
    if (lock_ >= 0 && !is_at(lock_, partial_)) return;  // another process was faster
    // Renamed first, in one step: then no other process makes a file in it while it is being emptied, and all of them
    // notice.
    if (is_marked_or_empty(doomed())) remove_marked(doomed());
    const bool renamed = rename_with(partial_, doomed(), RENAME_NOREPLACE) == 0 ||
                         (is_marked_or_empty(doomed()) && ::rename(partial_.c_str(), doomed().c_str()) == 0);
    remove_marked(renamed ? doomed() : partial_);
  } catch (...) {  // out of memory while removing: the next run removes it
  }
}

void discard_unfinished_outputs() noexcept {
  unfinished().mutex.lock();  // for good
  for (const PartialOutput* output : unfinished().outputs) output->remove();
}

void rethrow_unless_given_up(const fs::path& within) {
  fs::path partial = within.parent_path();
  if (partial.extension() != ".partial") partial = partial.parent_path();
  try {
    throw;
  } catch (const Error& error) {
    const bool of_files = error.code() == ExitCode::resources || error.code() == ExitCode::bad_input;
    if (is_marked(partial) || !of_files) throw;
  }
  // A consequence of another process's failure, which has the last word on the exit code: when processes agree on one,
  // usage ranks below whatever ends a run that has begun to write.
  throw Error(ExitCode::usage, {.where = partial.string(),
                                .found = "another process has given up the run and removed it",
                                .expected = {},
                                .advice = {}});
}

}  // namespace gradclip
