#pragma once
// What a constant ratio does not explain, element by element: the ratio is found before it is known which elements to
// hold against it.

#include <set>
#include <span>
#include <vector>

#include "gradclip/analysis/diff.hpp"
#include "gradclip/analysis/diff_findings.hpp"

namespace gradclip {

/// Holds elements against B = ratio x A: they follow it within four epsilons, and within what subnormal numbers of both
/// types are rounded to. Pairs of which a side is not finite are none.
/// @param position  of the first, in the global tensor
[[nodiscard]] RatioLeftover elements_left_over(const ElementView& a, const ElementView& b, std::size_t count,
                                               std::uint64_t position, double ratio, double epsilon);

/// Fills `leftover` of the groups' parameters in which there may be any: where only the sums of all elements told the
/// ratio, and where elements are too small to tell theirs. Reads these once more. Collective.
/// @param suspects  those of compare_blocks()
void measure_leftovers(DiffRun& run, const std::vector<ComparedPair>& pairs, const std::set<std::size_t>& suspects,
                       const std::vector<RatioGroup>& groups, std::vector<ParameterDifference>& parameters);

}  // namespace gradclip
