#pragma once
// Findings that follow from sums alone. Each function appends its own; docs/reports.md says what a kind means.

#include <vector>

#include "gradclip/base/finding.hpp"
#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {

/// `nonfinite`, one per parameter. @param zeroed  whether NaN and infinities were replaced by 0
void report_nonfinite(const Manifest& manifest, const ShardSums& sums, bool zeroed, std::vector<Finding>& findings);

/// `undeclared-plain-tensor`, one for the whole dump.
void report_undeclared(const Manifest& manifest, const std::vector<bool>& expert, std::vector<Finding>& findings);

/// `ranks-disagree`, one for the whole dump.
void report_disagreement(const ReferenceView& view, std::vector<Finding>& findings);

/// `nothing-seen`. @param total  of all counted elements
void report_nothing_seen(const TensorStatistics& total, std::vector<Finding>& findings);

}  // namespace gradclip
