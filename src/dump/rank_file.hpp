#pragma once
// One rank_*.h5, read-only: which gradients it holds and where their bytes lie.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/dump/manifest.hpp"

namespace gradclip {

/// A recorded rank's local gradient of one parameter, found and checked against the manifest.
struct StoredShard {
  bool none = false;  ///< the gradient was None: nothing below is meaningful
  DType dtype = DType::float32;
  std::uint64_t elements = 0;
  /// Where the elements lie one after another in the file; empty for filtered datasets, which are read through HDF5.
  std::optional<std::uint64_t> file_offset;
  std::uint64_t dataset_offset = 0;      ///< elements of the dataset before the shard (packed layout)
  std::optional<std::uint64_t> xxh3_64;  ///< of the raw local bytes, if recorded
  std::optional<float> scale_inv;        ///< float8
  std::string dataset;                   ///< path in the file, for messages and HDF5
  ShardLayout layout;                    ///< the recorded offset or ranges considered
  bool own_slice = false;                ///< whether they decided, and not the placements
};

/// The labels of one microbatch, found and checked: int64 [batch, sequence].
struct StoredLabels {
  std::int64_t batch = 0;
  std::int64_t sequence = 0;

  [[nodiscard]] std::uint64_t elements() const noexcept {
    return static_cast<std::uint64_t>(batch) * static_cast<std::uint64_t>(sequence);
  }
};

/// An open rank file. Thread-safe: HDF5 runs under one lock of the process, positional reads beside it.
class RankFile {
 public:
  /// Opens read-only and checks the root attributes. Errors: Error(bad_input) for a missing file, no HDF5 file, a
  /// truncated one, another rank's or job's; symlinks that lead out of the dump, anything but a regular file.
  /// Error(resources) for permissions and descriptors.
  RankFile(const std::filesystem::path& directory, const Manifest& manifest, std::int32_t rank);
  /// Stands for a file that cannot be read: every gradient of the rank is None.
  RankFile(const Manifest& manifest, std::int32_t rank);
  ~RankFile();
  RankFile(const RankFile&) = delete;
  RankFile& operator=(const RankFile&) = delete;

  [[nodiscard]] std::int32_t rank() const noexcept;
  [[nodiscard]] const std::filesystem::path& path() const noexcept;
  [[nodiscard]] bool packed() const noexcept;  ///< /packed instead of /gradients

  /// Finds one parameter's local gradient. Remembered, so that a second call is cheap.
  /// Errors: Error(bad_input) naming file, dataset, parameter and rank with what was found and expected: neither
  /// present nor in /none, both, a wrong shape or type, an offset that contradicts the placements, storage that runs
  /// past the end of the file, soft, external or second links, external storage, virtual datasets, an unknown filter.
  [[nodiscard]] const StoredShard& locate(std::size_t parameter) const;

  /// From now on the parameter's gradient is None here. @pre locate() did not find it, or nobody works on it
  void leave_out(std::size_t parameter) const;

  /// What the file holds beyond the gradients that the manifest gives to this rank: "/gradients/NAME",
  /// "/packed/index, NAME", "/none, NAME". Ascending in each of these. Other objects of the file are the user's.
  /// Errors: Error(bad_input) for what is damaged.
  [[nodiscard]] std::vector<std::string> surplus() const;

  /// Reads elements [first, first + count) of the row-major local shard into `to` (host memory).
  /// Errors: Error(bad_input) for a file that ends early (changed while it was read), Error(resources) for EIO and
  /// others.
  void read(const StoredShard& shard, std::uint64_t first, std::uint64_t count, std::byte* to) const;

  /// Several runs of elements, one after another in the file where possible: one system call for neighbours.
  struct Piece {
    const StoredShard* shard;
    std::uint64_t first;
    std::uint64_t count;
    std::byte* to;
  };
  void read(const std::vector<Piece>& pieces) const;

  /// What /labels holds, by local microbatch. Errors: Error(bad_input) naming file and dataset: another type than
  /// little-endian int64, other than two dimensions, a number left out, links and storage as for gradients.
  [[nodiscard]] std::vector<StoredLabels> labels() const;
  /// Reads labels [first, first + count) of a microbatch, row-major. @pre within labels()[microbatch]
  void read_labels(std::size_t microbatch, std::uint64_t first, std::uint64_t count, std::int64_t* to) const;

 private:
  friend class RankFileWriter;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradclip
