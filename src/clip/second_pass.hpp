#pragma once
// The second pass: every element scaled and clipped, written, and measured as written.

#include <cstdint>
#include <map>
#include <string>

#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/norm/total_norm.hpp"

namespace gradclip {

struct SecondPass {
  std::map<std::string, FileRecord> files;  ///< of all rank files, on every process
  double total = 0.0;                       ///< the exact p-norm of what was written
  std::uint32_t kept_files = 0;             ///< of them, written by an earlier run
};

/// Writes all rank files of `output`, which is prepared. Collective; every process gets the same result.
/// @param expert  by parameter
[[nodiscard]] SecondPass write_clipped(Run& run, DumpWriter& output, const FactorsOf& factors_of,
                                       const std::vector<bool>& expert, NormOrder order);

}  // namespace gradclip
