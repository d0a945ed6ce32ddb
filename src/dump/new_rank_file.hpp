#pragma once
// A rank file that is made from nothing: datasets first, then their bytes by position, by any number of processes.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradclip/base/dtype.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/dump/rank_file.hpp"

namespace gradclip {

/// A gradient to be written.
struct NewGradient {
  std::string dataset;              ///< link below /gradients
  std::vector<std::int64_t> shape;  ///< local
  DType dtype = DType::float32;
  std::optional<float> scale_inv;
};

/// Of the whole file.
struct NewRankFileHead {
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::optional<std::int64_t> step;
};

class NewRankFile {
 public:
  /// Creates the file with all datasets in the plain layout, contiguous, allocated and unfilled, the oldest format, no
  /// times: the same arguments give the same bytes. Nothing is left open: many files may grow at a time.
  /// @param none    recorded names of gradients that are None
  /// @param labels  by local microbatch
  /// Errors: Error(resources); no space is noticed here.
  NewRankFile(std::filesystem::path path, const NewRankFileHead& head, const std::vector<NewGradient>& gradients,
              const std::vector<std::string>& none, const std::vector<StoredLabels>& labels = {});
  ~NewRankFile();
  NewRankFile(NewRankFile&&) noexcept;
  NewRankFile& operator=(NewRankFile&&) noexcept;

  [[nodiscard]] const std::filesystem::path& path() const noexcept;
  /// Where each gradient's first byte lies in the file; whoever writes opens it once more (PosixFile).
  [[nodiscard]] const std::vector<std::uint64_t>& offsets() const noexcept;
  /// The same of each microbatch's labels.
  [[nodiscard]] const std::vector<std::uint64_t>& label_offsets() const noexcept;

  /// Adds the checksums, syncs. @param checksums  XXH3-64 of each gradient's bytes
  /// @param read_back  the file is then read and compared with them
  /// @return size and XXH3-64 of the whole file as it is on disk. Errors: Error(resources), for a file that reads back
  /// with other bytes too.
  [[nodiscard]] FileRecord finish(std::span<const std::uint64_t> checksums, bool read_back);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradclip
