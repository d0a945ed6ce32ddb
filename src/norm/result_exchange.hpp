#pragma once
// Shard results on their way to the processes that own their parameters: in ranges of parameters that fit in memory, so
// that no table of parameters × recorded ranks exists.

#include <cstddef>
#include <vector>

#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {

/// Parameters that go through one exchange; the same on every process. A process holds its recorded ranks' results of
/// them, twice while they travel, in a quarter of its memory budget, or in 64 MiB if that is more. Every range opens
/// every rank file once more, which costs far more than a result: the ranges are as long as memory allows.
[[nodiscard]] std::size_t parameters_per_exchange(const Run& run);

/// Sends every result to the process that owns its parameter (parameter index modulo processes). Collective.
/// @return what this process owns, ascending by parameter and rank
[[nodiscard]] std::vector<ShardResult> exchange_results(Run& run, std::vector<ShardResult> results);

}  // namespace gradclip
