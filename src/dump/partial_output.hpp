#pragma once
// OUT.partial beside OUT: where an output grows until it is whole. Made by one process, written and locked by all,
// what it holds renamed at the end, or all of it removed.
//
//   OUT.partial/.gradclip-partial   says that gradclip made it, and what run: nothing else is ever removed or continued
//   OUT.partial/output              what becomes OUT, a directory or a file; after an exchange the old one
//   OUT.partial/finished/NAME       notes on files of output/ that are whole (finished_files.hpp)
//   OUT.partial.removed             the same, while it is being removed

#include <cstdint>
#include <filesystem>
#include <string>

namespace gradclip {

enum class OutputKind : std::uint8_t {
  dump,  ///< OUT is a directory with a manifest
  file,  ///< OUT is a safetensors file
};

/// Errors: Error(usage) if `output`, or a directory that stands in for it while it is written, is the input, lies
/// inside it or contains it (after symlinks), or cannot be a name: PartialOutput's own check, for further inputs.
void require_apart(const std::filesystem::path& input, const std::filesystem::path& output, bool overwrite);
/// What becomes of an output that does not get finished, and of one that an earlier run left behind.
enum class Leftover : std::uint8_t {
  removed,
  continued,  ///< kept for the next run, and what an earlier run of the same kind finished is taken over
};

/// The output of one run. One process creates (prepare), every process makes files in it, the one that created it
/// publishes.
class PartialOutput {
 public:
  /// Checks and names, creates nothing. Errors: Error(usage) if `output`, or a directory that stands in for it while it
  /// is written, is the input, lies inside it or contains it (after symlinks); if it exists and `overwrite` is false,
  /// or is not of the kind that replaces it; if it cannot be a name.
  /// @param input  empty: there is none
  PartialOutput(const std::filesystem::path& input, const std::filesystem::path& output, bool overwrite,
                OutputKind kind, Leftover leftover = Leftover::removed);
  /// As discard(), in the process that prepared it. Nothrow.
  ~PartialOutput();
  PartialOutput(const PartialOutput&) = delete;
  PartialOutput& operator=(const PartialOutput&) = delete;

  /// Creates and locks OUT.partial, removing a leftover that no living process holds the lock of; or taking it over if
  /// it is of a run with this `identity` and Leftover::continued. One process calls it, before the others touch().
  /// @param identity  one line: whatever decides on the output's bytes. Empty: such a run cannot be continued
  /// Errors: Error(resources) if another run holds it, or it cannot be created; Error(usage) if it is somebody else's.
  void prepare(const std::string& identity = {});
  [[nodiscard]] bool prepared() const noexcept { return prepared_; }

  /// Whether the OUT.partial that this process sees was prepared with this identity, which is not empty. Nothrow: what
  /// cannot be read was not.
  [[nodiscard]] bool is_prepared_as(const std::string& identity) const noexcept;

  /// OUT.partial.
  [[nodiscard]] const std::filesystem::path& directory() const noexcept { return partial_; }
  /// In it, what becomes OUT.
  [[nodiscard]] std::filesystem::path made() const { return partial_ / "output"; }
  /// This process is about to make something in OUT.partial, which discard() then removes: takes a share of the lock,
  /// so that no other run begins while it lives.
  void touch() noexcept;

  /// Syncs and renames to OUT (an exchange with the old OUT where `overwrite`, which is then removed). The process that
  /// prepared calls it, once everything is written and synced. Errors: Error(resources); Error(usage) if another
  /// process has given up the run. An old OUT is then still in its place.
  void publish();

  /// Removes OUT again, which this process published, unless it replaced another: for a run that fails elsewhere.
  /// Nothrow.
  void withdraw() noexcept;

  /// Removes what all processes have written so far, while they may still be writing: for a process that ends the run.
  /// Nothing with Leftover::continued. Nothrow.
  void discard() noexcept;

 private:
  friend void discard_unfinished_outputs() noexcept;
  void put_in_place();
  void remove() const noexcept;
  void take_lock(bool& fresh);
  void remember() noexcept;
  void forget() noexcept;
  [[nodiscard]] std::filesystem::path doomed() const;

  OutputKind kind_;
  Leftover leftover_;
  std::filesystem::path output_;
  std::filesystem::path partial_;
  bool overwrite_;
  int lock_ = -1;
  bool prepared_ = false;
  bool touched_ = false;  // this process has made something in OUT.partial, or may have
  bool finished_ = false;
  bool replaced_ = false;  // an old OUT, which is gone
};

/// Discards every output that this process has touched and that is not published: for a thread that ends the process,
/// in which no output can be prepared, touched or forgotten any more: who tries waits for ever. Thread-safe, nothrow.
void discard_unfinished_outputs() noexcept;

/// For a handler of an error of writing into `within`, PartialOutput::made() or a file in that: rethrows it, unless
/// another process has discarded the output and so caused it; then throws Error(usage) saying that.
[[noreturn]] void rethrow_unless_given_up(const std::filesystem::path& within);

}  // namespace gradclip
