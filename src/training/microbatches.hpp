#pragma once
// Which dumps are the microbatches of one step, in which order, and what their recorded flags say.

#include <memory>
#include <optional>
#include <vector>

#include "gradclip/base/finding.hpp"
#include "gradclip/dump/dump_reader.hpp"

namespace gradclip {

using MicrobatchDumps = std::vector<std::unique_ptr<DumpReader>>;

/// In the order of their recorded index. Errors: Error(bad_input) naming the dump and what does not fit: no microbatch,
/// an index that is missing or stands twice, another number of dumps than microbatches, other parameters, meshes,
/// placements, types of accumulation, step or world size than the first's.
void order_microbatches(MicrobatchDumps& dumps);

/// The microbatches that a reduction follows, true by position: each ends a synchronisation window.
/// @param dumps  ordered
/// @param sync   in place of what was recorded; empty: each microbatch's own "synchronised", and where that is missing
///               the recorded "accumulation", else deferred
/// Errors: Error(bad_input) naming the dump where the last microbatch ends none, so that a window never comes to its
/// reduction, and where a schedule step is cut off.
[[nodiscard]] std::vector<bool> synchronisation_windows(const MicrobatchDumps& dumps,
                                                        std::optional<Synchronisation> sync);

/// What the flags of a step cannot be: `fp8-cache` where the first-microbatch flag is on for none, for several, or for
/// another than the first; `sync-window` where the optimizer-step flag is on for another than the last, or off there.
/// Flags that were not recorded are no finding. @param dumps  ordered
[[nodiscard]] std::vector<Finding> flag_findings(const MicrobatchDumps& dumps);

}  // namespace gradclip
