#pragma once
// Writing a dump of the input's layout: whole or absent.
//
// Everything is written to OUT.partial beside OUT; rank files first, each checksummed and synced, the manifest last,
// then one rename to OUT. Whoever is destroyed before finish() removes what it made, unless the next run is to continue
// it.

#include <cstdint>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/dump/finished_files.hpp"
#include "gradclip/dump/partial_output.hpp"

namespace gradclip {

/// One rank file being written: the input's objects (datasets in the same order with the same types, filters and
/// attributes, /none, /labels, unknown objects), gradients replaced.
class RankFileWriter {
 public:
  /// Creates the file, all datasets allocated and unfilled. Errors: Error(resources) (no space is noticed here);
  /// Error(usage) if another process has given up the run.
  RankFileWriter(std::filesystem::path path, std::shared_ptr<const RankFile> input, const Manifest& manifest);
  ~RankFileWriter();  ///< removes the file unless finish() was called
  RankFileWriter(const RankFileWriter&) = delete;
  RankFileWriter& operator=(const RankFileWriter&) = delete;

  /// Writes elements [first, first + count) of a parameter's local shard. Thread-safe; every element is written exactly
  /// once. A shard's pieces may come from several threads, but are begun in ascending order of (order of parameters in
  /// the file, first): a piece waits for the hash of the one before it. Errors: Error(resources).
  void write(std::size_t parameter, std::uint64_t first, std::uint64_t count, const std::byte* from);

  /// Wakes every thread that waits in write(), which then throws `why`: for a caller whose other thread failed. The
  /// first cause stays. Nothrow. @pre why is not null.
  void cancel(std::exception_ptr why) noexcept;

  /// Checksums as attributes (xxh3_64 of what was given to write()), closes, syncs.
  /// @param read_back  the file is then read and compared with what was given to write()
  /// @return size and XXH3-64 of the whole file as it is on disk.
  /// Errors: Error(resources), for a file that reads back with other bytes too; Error(usage) if another process has
  /// given up the run; Error(bug) if an element was not written.
  FileRecord finish(bool read_back = false);

 private:
  void require_written(const FileRecord& record) const;

  struct State;
  std::unique_ptr<State> state_;
};

/// The output directory of one run. One process creates (prepare), every process opens rank files in it, the one that
/// created it finishes.
class DumpWriter {
 public:
  /// A dump of the input's layout, or one that is merely made beside it (empty: from nothing).
  /// Errors: as PartialOutput.
  DumpWriter(const DumpReader& input, const std::filesystem::path& output, bool overwrite,
             Leftover leftover = Leftover::removed);
  DumpWriter(const std::filesystem::path& input, const std::filesystem::path& output, bool overwrite);

  /// Hosts may have an OUT of their own each, in storage that others do not see: several processes prepare and finish.
  void let_hosts_have_their_own() noexcept { several_ = true; }
  [[nodiscard]] bool several() const noexcept { return several_; }

  /// As PartialOutput.
  void prepare(const std::string& identity = {}) { output_.prepare(identity); }
  [[nodiscard]] bool prepared() const noexcept { return output_.prepared(); }
  /// Whether OUT.partial, as this process sees it, was prepared with this identity.
  [[nodiscard]] bool is_prepared_as(const std::string& identity) const noexcept {
    return output_.is_prepared_as(identity);
  }

  /// Whether rank files are read back when they are finished, and compared with what was computed.
  void read_back(bool wanted) noexcept { reads_back_ = wanted; }
  [[nodiscard]] bool reads_back() const noexcept { return reads_back_; }

  /// A recorded rank's file that an earlier run has finished, if it is still what that run noted; reads it. Such a file
  /// is not begun again. Thread-safe. Errors: as finished_file().
  [[nodiscard]] std::optional<FinishedFile> finished(std::int32_t rank) const;
  /// Notes for a later run that the rank's file is whole. Thread-safe. Errors: as note_finished_file(); Error(usage) if
  /// another process has given up the run.
  void note_finished(std::int32_t rank, const FinishedFile& file) const;

  /// One rank file of the input's layout; in the place of one that an earlier run has left.
  [[nodiscard]] std::unique_ptr<RankFileWriter> begin(std::shared_ptr<const RankFile> input);
  /// Where other files of the dump are made.
  [[nodiscard]] std::filesystem::path writing_directory() {
    output_.touch();
    return output_.made();
  }

  /// Writes the manifest, syncs, renames OUT.partial to OUT (an exchange with the old OUT where `overwrite`, which is
  /// then removed). The process that prepared calls it, once all rank files are finished. Errors: Error(resources);
  /// Error(usage) if another process has given up the run. An old OUT is then still in its place.
  void finish(const ManifestChanges& changes);
  /// The manifest that finish() writes. Errors: as read_manifest().
  [[nodiscard]] std::string manifest_with(const ManifestChanges& changes) const;
  /// finish() with the manifest's whole text.
  void finish_with(const std::string& manifest);

  /// As PartialOutput.
  void discard() noexcept { output_.discard(); }
  void withdraw() noexcept { output_.withdraw(); }

 private:
  const DumpReader* input_ = nullptr;
  PartialOutput output_;
  bool continues_ = false;
  bool reads_back_ = false;
  bool several_ = false;
};

}  // namespace gradclip
