#pragma once
// Everything that is wrong with a dump, in one run (docs/command-line.md, `verify`).

#include <cstdint>
#include <optional>
#include <vector>

#include "gradclip/base/finding.hpp"
#include "gradclip/norm/total_norm.hpp"
#include "gradclip/verify/fault.hpp"

namespace gradclip {

struct VerifyOptions {
  NormOrder order;                       ///< of the totals that ranks would have used
  std::string ep_axis_name;              ///< empty: no axis
  std::optional<PipelineView> pipeline;  ///< empty: unknown, so ranks are not compared
  std::size_t threads = 1;               ///< that read whole files
  std::vector<ErrorText> problems;       ///< of the manifest, found so far; each with a kind
  bool isolate = false;                  ///< rank files are checked in helper processes (check_helper.hpp)
  bool complete = true;                  ///< ManifestReading::complete: else nothing is said of totals
};

/// What was looked at, and what vouches for it.
struct Verification {
  std::vector<Finding> findings;      ///< worst first (kKindsWorstFirst), then whole files, then manifest order
  std::uint64_t files = 0;            ///< rank files that could be read
  std::uint64_t file_checksums = 0;   ///< rank files of which the manifest has a checksum
  std::uint64_t files_compared = 0;   ///< of them those that are there and were compared with it
  std::uint64_t shards = 0;           ///< gradients that were found in them
  std::uint64_t shard_checksums = 0;  ///< of them with a checksum of their own
};

/// Checks the directory, every rank file, every shard (rank_check.hpp), then the values: NaN and infinities, copies,
/// tied weights, the totals of the ranks, gradients of nothing but zeros. Shards that cannot be read are left out of
/// the values, as if they were None, and what would follow from their absence alone is not reported. Values are raw:
/// nothing is scaled. Collective; every process gets the same. Errors: Error(resources).
[[nodiscard]] Verification verify_dump(Run& run, const VerifyOptions& options);

/// Findings of a manifest that cannot be used.
[[nodiscard]] std::vector<Finding> manifest_findings(std::span<const ErrorText> problems);

}  // namespace gradclip
