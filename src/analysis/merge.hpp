#pragma once
// A dump's full tensors, one for each parameter, from whatever layout: block by block, each block by one process, the
// same bytes for any number of processes and threads.

#include <vector>

#include "gradclip/analysis/merged_output.hpp"
#include "gradclip/base/finding.hpp"

namespace gradclip {

struct MergeResult {
  std::vector<MergedTensor> tensors;  ///< in model order
  std::vector<Finding> findings;      ///< by parameter: replicas-differ, partly-none, overflow
};

/// Writes raw values: nothing is scaled, every bit of a number stays, NaN payloads included. Partial gradients are
/// combined as the norm combines them, in float64, and rounded to their type once, by PyTorch's conversions. Of copies
/// the first rank's is written; where its gradient is None, the next one's, element by element. Elements that are None
/// on every rank while others of their tensor are not are written as 0. No tensor is ever in memory as a whole.
/// Collective; every process gets the same result. @pre run.dumps[1] is null
/// @param only  null: all parameters
/// Errors: as plan_merge, BlockAssembly::assemble and MergedOutput; nothing is left of the output then.
[[nodiscard]] MergeResult merge_dump(DiffRun& run, const NamePattern* only, MergedOutput& output);

}  // namespace gradclip
