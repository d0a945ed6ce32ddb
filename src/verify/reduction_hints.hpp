#pragma once
// Copies that differ, looked at for the usual cause: an all-reduce that some ranks made and others did not, or one that
// summed here and averaged there.

#include <map>
#include <string>
#include <vector>

#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {

/// For each parameter with copies that differ, by index, how one copy follows from the others: "rank 2 holds the sum of
/// the other copies", "rank 3 holds nothing but zeros", "rank 1 holds 4 times what rank 0 holds (4 copies: ...)". Only
/// what holds for every element within a few roundings of the gradient's type; parameters of which nothing is known are
/// absent. The first slice of a parameter that differs stands for all of them. Parameters beyond the first 100, and
/// beyond 64 copies, are not looked at. Collective; every process gets the same.
/// @param suspects  of one parameter each (no tied entries), ascending
/// @param absent    copies that are None
/// @param expert    by parameter
[[nodiscard]] std::map<std::uint32_t, std::string> reduction_hints(Run& run, const std::vector<Suspect>& suspects,
                                                                   const std::vector<AbsentCopy>& absent,
                                                                   const std::vector<bool>& expert);

}  // namespace gradclip
