#pragma once
// OUT.partial beside OUT: where an output grows until it is whole. Made and locked by one process, written by all,
// renamed at the end or removed.

#include <cstdint>
#include <filesystem>

namespace gradclip {

enum class OutputKind : std::uint8_t {
  dump,  ///< OUT is a directory with a manifest
  file,  ///< OUT is a safetensors file
};

/// The output of one run. One process creates (prepare), every process makes files in it, the one that created it
/// publishes.
class PartialOutput {
 public:
  /// Checks and names, creates nothing. Errors: Error(usage) if `output`, or a directory that stands in for it while it
  /// is written, is the input, lies inside it or contains it (after symlinks); if it exists and `overwrite` is false,
  /// or is not of the kind that replaces it; if it cannot be a name.
  /// @param input  empty: there is none
  PartialOutput(const std::filesystem::path& input, std::filesystem::path output, bool overwrite, OutputKind kind);
  /// In the process that prepared it: removes OUT.partial unless it was published. Nothrow.
  ~PartialOutput();
  PartialOutput(const PartialOutput&) = delete;
  PartialOutput& operator=(const PartialOutput&) = delete;

  /// Creates and locks OUT.partial, removing a leftover that nobody holds the lock of. One process calls it.
  /// Errors: Error(resources) if another run holds it, or it cannot be created; Error(usage) if it is somebody else's.
  void prepare();
  [[nodiscard]] bool prepared() const noexcept { return lock_ >= 0; }

  /// Signs OUT.partial, which this process prepared, so that others can tell whether they see this one.
  /// Errors: Error(resources).
  void sign(const std::string& signature);
  /// Whether the OUT.partial that this process sees carries the signature. Nothrow: what cannot be read does not.
  [[nodiscard]] bool is_signed(const std::string& signature) const noexcept;

  /// OUT.partial.
  [[nodiscard]] const std::filesystem::path& directory() const noexcept { return partial_; }
  /// In it, what becomes OUT where that is a file.
  [[nodiscard]] std::filesystem::path file() const { return partial_ / "tensors"; }
  /// This process is about to make something in OUT.partial, which discard() then removes.
  void touch() noexcept { touched_ = true; }

  /// Syncs and renames to OUT (an exchange with the old OUT where `overwrite`, which is then removed). The process that
  /// prepared calls it, once everything is written and synced. Errors: Error(resources); Error(usage) if another
  /// process has given up the run. An old OUT is then still in its place.
  void publish();

  /// Removes OUT again, which this process published, unless it replaced another: for a run that fails elsewhere.
  /// Nothrow.
  void withdraw() noexcept;

  /// Removes what all processes have written so far, while they may still be writing: for a process that ends the run.
  /// Nothrow.
  void discard() noexcept;

 private:
  void publish_file();
  /// @return where the old OUT is now; empty: there was none.
  [[nodiscard]] std::filesystem::path publish_directory();

  OutputKind kind_;
  std::filesystem::path output_;
  std::filesystem::path partial_;
  bool overwrite_;
  int lock_ = -1;
  bool touched_ = false;  // this process has made something in OUT.partial, or may have
  bool finished_ = false;
  bool replaced_ = false;  // an old OUT, which is gone
};

/// For a handler of an error of writing into OUT.partial: rethrows it, unless another process has discarded the output
/// and so caused it; then throws Error(usage) saying that.
[[noreturn]] void rethrow_unless_given_up(const std::filesystem::path& partial);

}  // namespace gradclip
