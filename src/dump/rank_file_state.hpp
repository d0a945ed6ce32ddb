#pragma once
// What is behind RankFile, for its writer too. Inside this room.

#include <array>
#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "gradclip/dump/hdf5.hpp"
#include "gradclip/dump/packed_index.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/dump/rank_file.hpp"

namespace gradclip {

struct RankFile::State {
  State(const std::filesystem::path& directory, const Manifest& manifest, std::int32_t rank);
  State(const Manifest& manifest, std::int32_t rank);  // without a file

  // ---- fixed after construction
  const Manifest& manifest;
  std::int32_t rank;
  std::filesystem::path path;
  std::uint64_t id;  // of this open file, unique in the process
  PosixFile file;
  std::uint64_t file_size = 0;
  hdf5::Handle hdf5_file;
  hdf5::Handle gradients;  // group, if there is one
  hdf5::Handle packed;     // group, if there is one

  /// A packed dataset or a filtered one, kept open.
  using OpenDataset = std::shared_ptr<const hdf5::Dataset>;

  // ---- under the mutex
  std::mutex mutex;
  std::unordered_map<std::size_t, std::unique_ptr<const StoredShard>> located;
  std::unordered_map<std::uint64_t, std::size_t> parameter_at;  // by object address
  std::optional<std::unordered_set<std::string>> none;
  std::optional<PackedIndex> index;
  std::size_t looked_up = 0;               // in /gradients, one by one
  std::optional<hdf5::LinkTargets> links;  // of /gradients, once several were looked up
  std::array<OpenDataset, kDTypeCount> packed_datasets;
  std::pair<std::string, OpenDataset> last_opened;  // filtered, by path

  void check_root_attributes() const;
  /// Checked. Under HDF5's lock.
  [[nodiscard]] hdf5::Dataset open_labels(const hdf5::Handle& group, std::size_t microbatch) const;
  void load_none();
  void load_index();
  [[nodiscard]] std::unique_ptr<const StoredShard> find(std::size_t parameter);
  [[nodiscard]] std::unique_ptr<const StoredShard> none_shard(std::size_t parameter) const;
  /// A link of /gradients.
  [[nodiscard]] hdf5::LinkTarget look_up(const std::string& dataset, const std::string& where);
  [[nodiscard]] std::unique_ptr<const StoredShard> find_dataset(std::size_t parameter, const hdf5::LinkTarget& link,
                                                                const std::string& where);
  [[nodiscard]] std::unique_ptr<const StoredShard> find_packed(std::size_t parameter, const PackedShard& entry,
                                                               const std::string& where);
  [[nodiscard]] const OpenDataset& packed_dataset(DType dtype);
  /// The dataset of a shard that is not contiguous.
  [[nodiscard]] OpenDataset filtered_dataset(const StoredShard& shard);
  /// Checks that contiguous data lies within the file.
  void check_storage(const hdf5::Dataset& dataset, const std::string& where) const;
  void read_dataset(const hdf5::Dataset& dataset, std::uint64_t first, std::uint64_t count, std::byte* to,
                    const std::string& where) const;
  [[nodiscard]] std::string where(const std::string& within) const { return path.string() + ", " + within; }
};

}  // namespace gradclip
