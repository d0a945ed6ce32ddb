#pragma once
// Where merged tensors go: one file, made by one process, written by all of them by position.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "gradclip/analysis/merged_tensors.hpp"

namespace gradclip {

/// The output of one merge. It appears whole or not at all.
class MergedOutput {
 public:
  virtual ~MergedOutput() = default;

  [[nodiscard]] virtual MergeFormat format() const noexcept = 0;

  /// Makes the file with room for all tensors. One process calls it. @return where each one's first byte lies (0 for
  /// those that are not written). Errors: as PartialOutput::prepare; Error(resources).
  [[nodiscard]] virtual std::vector<std::uint64_t> create(const std::vector<MergedTensor>& tensors) = 0;

  /// The file, for a process that is about to write to it.
  [[nodiscard]] virtual std::filesystem::path file() = 0;

  /// Whether finish() is to have the XXH3-64 of each tensor's bytes.
  [[nodiscard]] virtual bool takes_checksums() const noexcept = 0;

  /// Syncs and gives the output its name. The process that created it calls it, once everything is written, and synced
  /// by the other processes. Errors: as PartialOutput::publish.
  virtual void finish(const std::vector<MergedTensor>& tensors, std::span<const std::uint64_t> checksums) = 0;

  /// Removes what was written, in whichever process ends the run. Nothrow.
  virtual void discard() noexcept = 0;
};

/// Checks and names, creates nothing. @param input  outlives it  Errors: as PartialOutput.
[[nodiscard]] std::unique_ptr<MergedOutput> make_merged_output(const DumpReader& input,
                                                               const std::filesystem::path& output, bool overwrite,
                                                               MergeFormat format);

}  // namespace gradclip
