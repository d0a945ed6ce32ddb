#pragma once
// Shard results on their way to the processes that own their parameters: in ranges of parameters that fit in memory, so
// that no table of parameters × recorded ranks exists.

#include <cstddef>
#include <vector>

#include "gradclip/norm/shard_sums.hpp"
#include "gradclip/stream/task_list.hpp"
#include "gradclip/stream/work_plan.hpp"

namespace gradclip {

/// All parameters, cut into those that go through one exchange; the same on every process, at least one range. A
/// process holds its recorded ranks' results of a range, twice while they travel. Every range opens every rank file
/// once more, which costs far more than a result: the ranges are as long as `bytes` allow.
[[nodiscard]] std::vector<ParameterRange> exchange_ranges(const Manifest& manifest, const WorkPlan& plan,
                                                          std::size_t bytes);

/// The same in a quarter of the run's memory budget, or in 64 MiB if that is more.
[[nodiscard]] std::vector<ParameterRange> exchange_ranges(const Run& run);

/// Sends every result to the process that owns its parameter (parameter index modulo processes). Collective.
/// @return what this process owns, ascending by parameter and rank
[[nodiscard]] std::vector<ShardResult> exchange_results(Run& run, std::vector<ShardResult> results);

}  // namespace gradclip
