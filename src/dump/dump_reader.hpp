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

#include "gradclip/dump/manifest.hpp"
#include "gradclip/dump/rank_file.hpp"

namespace gradclip {

/// Opens rank files when they are asked for and keeps the most recently used ones open (fewer than RLIMIT_NOFILE
/// allows; the soft limit is raised towards the hard one first). Never writes.
class DumpReader {
 public:
  /// Reads and checks the manifest; opens no rank file. Errors: as read_manifest().
  explicit DumpReader(std::filesystem::path directory);

  [[nodiscard]] const std::filesystem::path& directory() const noexcept { return directory_; }
  [[nodiscard]] const Manifest& manifest() const noexcept { return manifest_; }

  /// How many rank files are kept open at most: a caller that goes over more of them, batch by batch, takes no more
  /// than this into one. At least 1.
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }

  /// Lowers the capacity: an open rank file remembers the shards that were located in it.
  void keep_at_most(std::size_t rank_files) noexcept {
    capacity_ = std::max<std::size_t>(1, std::min(capacity_, rank_files));
  }

  /// Thread-safe. Errors: as RankFile's constructor.
  [[nodiscard]] std::shared_ptr<const RankFile> rank_file(std::int32_t rank);

 private:
  std::filesystem::path directory_;
  Manifest manifest_;
  std::size_t capacity_;
  std::mutex mutex_;
  std::list<std::shared_ptr<const RankFile>> recent_;  // most recently used first
  std::unordered_map<std::int32_t, std::list<std::shared_ptr<const RankFile>>::iterator> open_;
};

}  // namespace gradclip
