#pragma once
// Copies that should be equal: which differ, by how much, and where first.

#include <vector>

#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {

/// Compares the suspects' values chunk by chunk: ±0 are equal, and NaN to NaN; float8 with its scale_inv. Only chunks
/// whose hashes differ move between processes, within the memory budget. Collective; every process gets the same
/// findings: first kind `nonfinite`, for each parameter of which a copy that does not count has a NaN or infinity where
/// the one that counts has a number; then kind `replicas-differ` (or `tied-differ` between entries of a tied weight),
/// one per parameter, in manifest order, with the largest absolute difference (NaN where NaN meets a number), the first
/// differing global index, and the ranks of all copies that disagree.
/// The message says which of more than two copies agree.
/// @param absent  copies that are None where others are not: part of the same finding.
/// @param expert  by parameter
[[nodiscard]] std::vector<Finding> compare_replicas(Run& run, const std::vector<Suspect>& suspects,
                                                    const std::vector<AbsentCopy>& absent,
                                                    const std::vector<bool>& expert);

/// Suspects between the entries of tied weights: shards of the same slice whose bytes differ. Entries that are cut
/// differently are compared by their statistics, and findings are made at once.
[[nodiscard]] std::vector<Suspect> tied_suspects(const Run& run, const ShardSums& sums, const ParameterFactors& factors,
                                                 NormOrder order, std::vector<Finding>& findings);

}  // namespace gradclip
