#pragma once
// The second pass: every element scaled and clipped, written, and measured as written.

#include <vector>

#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/norm/total_norm.hpp"
#include "gradclip/writing/joint_dump.hpp"

namespace gradclip {

struct SecondPass {
  std::vector<WrittenRank> files;  ///< that this process wrote
  double total = 0.0;              ///< the exact p-norm of what all wrote
};

/// Writes this process's rank files of `output`, which is prepared. Collective; every process gets the same total.
/// @param expert  by parameter
[[nodiscard]] SecondPass write_clipped(Run& run, DumpWriter& output, const FactorsOf& factors_of,
                                       const std::vector<bool>& expert, NormOrder order);

}  // namespace gradclip
