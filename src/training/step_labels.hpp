#pragma once
// The labels of a step's microbatches, put together in the step's own rank files.

#include <cstdint>
#include <vector>

#include "gradclip/dump/new_rank_file.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/training/microbatches.hpp"

namespace gradclip {

/// One rank's labels, microbatch by microbatch.
class StepLabels {
 public:
  /// @param dumps  ordered. Errors: as RankFile::labels
  StepLabels(const MicrobatchDumps& dumps, std::int32_t rank);

  /// Empty where it holds none, or not of every microbatch.
  [[nodiscard]] const std::vector<StoredLabels>& shapes() const noexcept { return shapes_; }
  /// Whether it holds those of some microbatches only: their numbers would say nothing.
  [[nodiscard]] bool incomplete() const noexcept { return incomplete_; }

  /// Copies them. @param offsets  in the file, by shapes()
  void write(const PosixFile& file, const std::vector<std::uint64_t>& offsets) const;

 private:
  struct Place {
    std::size_t dump;
    std::size_t microbatch;  ///< of that dump's own
  };

  const MicrobatchDumps& dumps_;
  std::int32_t rank_;
  std::vector<StoredLabels> shapes_;
  std::vector<Place> places_;
  bool incomplete_ = false;
};

}  // namespace gradclip
