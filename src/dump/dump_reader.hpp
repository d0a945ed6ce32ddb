#pragma once
// A dump as parameters × recorded ranks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "gradclip/dump/manifest.hpp"
#include "gradclip/dump/rank_file.hpp"

namespace gradclip {

/// Opens rank files when they are asked for and keeps the most recently used ones open (fewer than RLIMIT_NOFILE
/// allows; the soft limit is raised towards the hard one first). Never writes.
class DumpReader {
 public:
  /// Reads and checks the manifest; opens no rank file. Errors: as read_manifest().
  explicit DumpReader(std::filesystem::path directory);
  /// A manifest that was read already.
  DumpReader(std::filesystem::path directory, Manifest manifest);

  [[nodiscard]] const std::filesystem::path& directory() const noexcept { return directory_; }
  [[nodiscard]] const Manifest& manifest() const noexcept { return manifest_; }

  /// How many rank files are kept open at most: a caller that goes over more of them, batch by batch, takes no more
  /// than this into one. At least 1.
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }

  /// Lowers the capacity: an open rank file remembers the shards that were located in it.
  void keep_at_most(std::size_t rank_files) noexcept {
    capacity_ = std::max<std::size_t>(1, std::min(capacity_, rank_files));
  }

  /// Thread-safe. Errors: as RankFile's constructor; as require_unchanged() for a file that is opened again.
  [[nodiscard]] std::shared_ptr<const RankFile> rank_file(std::int32_t rank);

  /// The manifest and every rank file that was opened so far are still the files that they were at first, with their
  /// sizes and their times: for whoever is about to say what was in them. Thread-safe. Errors: Error(bad_input) naming
  /// a file that was replaced, written to or removed.
  void require_unchanged();

  /// From now on the rank's gradient of the parameter, or all of its gradients, are taken as None: for what was found
  /// to be damaged, so that the rest can be worked on. Not while rank files are in use elsewhere.
  void leave_out(std::int32_t rank, std::size_t parameter);
  void leave_out(std::int32_t rank);

 private:
  /// What tells a file from one that takes its place.
  struct Identity {
    std::uint64_t device = 0, inode = 0, bytes = 0;
    std::int64_t seconds = 0, nanoseconds = 0;  // of its last change

    friend bool operator==(const Identity&, const Identity&) = default;
  };
  [[nodiscard]] static Identity identify(const std::filesystem::path& file);
  static void require_same(const std::filesystem::path& file, const Identity& before);
  [[nodiscard]] std::filesystem::path path_of(std::int32_t rank) const;

  std::filesystem::path directory_;
  Identity manifest_file_;  // before it was read
  Manifest manifest_;
  std::size_t capacity_;
  std::mutex mutex_;
  std::list<std::shared_ptr<const RankFile>> recent_;  // most recently used first
  std::unordered_map<std::int32_t, std::list<std::shared_ptr<const RankFile>>::iterator> open_;
  std::unordered_map<std::int32_t, Identity> opened_;                    // as they were when they were opened first
  std::unordered_map<std::int32_t, std::vector<std::size_t>> left_out_;  // parameters by rank
  std::unordered_set<std::int32_t> left_out_ranks_;
};

}  // namespace gradclip
