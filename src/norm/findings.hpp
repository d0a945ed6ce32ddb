#pragma once
// Findings that follow from sums alone. Each function appends its own; docs/reports.md says what a kind means.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gradclip/base/finding.hpp"
#include "gradclip/norm/shard_sums.hpp"
#include "gradclip/norm/total_norm.hpp"

namespace gradclip {

/// "rank 3", "ranks 0, 1, 2": the first few, and how many more.
[[nodiscard]] std::string named_ranks(std::span<const std::int32_t> ranks);

/// How copies differ. @param largest  the largest difference of numbers
/// @param nan_rank  which has a NaN where number_rank has a number; -1: none
/// @param first_rank  whose copy is the first that differs
[[nodiscard]] std::string copies_differ(double largest, std::int32_t nan_rank, std::int32_t number_rank,
                                        std::int32_t first_rank);

/// `nonfinite`, one per parameter, of what counts. @param zeroed  whether NaN and infinities were replaced by 0
void report_nonfinite(const Manifest& manifest, const ShardSums& sums, bool zeroed, std::vector<Finding>& findings);

/// `placement`, where the parameter's shards that count are not the tensor, each element once. Of one of which a
/// gradient is None nothing is said.
void report_coverage(const Manifest& manifest, std::size_t parameter, const ShardSums& sums, bool expert,
                     std::vector<Finding>& findings);

/// `undeclared-plain-tensor`, one for the whole dump.
void report_undeclared(const Manifest& manifest, const std::vector<bool>& expert, std::vector<Finding>& findings);

/// `ranks-disagree`, one for the whole dump.
void report_disagreement(const ReferenceView& view, std::vector<Finding>& findings);

/// `total-nonfinite`: the total, or in the numerics of a training step that of a rank, where no finding `nonfinite`
/// explains it: after these.
void report_total(NormResult& result, Numerics numerics);

/// `nothing-seen`. @param total  of all counted elements
void report_nothing_seen(const TensorStatistics& total, std::vector<Finding>& findings);

}  // namespace gradclip
