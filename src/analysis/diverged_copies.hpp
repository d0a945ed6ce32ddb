#pragma once
// Parameters of which a dump's own copies are not the same: how they differ, and whether they are addends in truth.

#include <set>
#include <vector>

#include "gradclip/analysis/block_comparison.hpp"

namespace gradclip {

/// Compares these parameters again, with the values of all copies: the results in `parameters` are replaced (where the
/// copy that counts is None, the next one counts), and copies that differ are findings `replicas-differ`, one for each
/// parameter and dump, in order. A finding says where the sum or the mean of the copies is what the other dump has:
/// what a reduction that never ran leaves. Collective; every process gets the same.
[[nodiscard]] std::vector<Finding> compare_copies(DiffRun& run, const std::vector<ComparedPair>& pairs,
                                                  const std::set<std::size_t>& suspects, std::size_t max_elements,
                                                  std::vector<ParameterDifference>& parameters);

}  // namespace gradclip
