#pragma once
// What a run leaves for the one that continues it: how to tell that it is the same, and what was measured on each
// finished rank file, so that no gradient of it is scaled again.

#include <optional>
#include <string>
#include <vector>

#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/norm/statistics.hpp"
#include "gradclip/stream/task_list.hpp"

namespace gradclip {

/// Whatever decides on the rank files' bytes, as one line: the input's manifest, sizes and times of its rank files, the
/// factors of every parameter, and what the output's manifest records of the run. @param expert  by parameter
/// Errors: Error(bad_input) for a rank file that is missing.
[[nodiscard]] std::string run_identity(const DumpReader& input, const FactorsOf& factors_of,
                                       const std::vector<bool>& expert, const std::string& record);

/// The statistics as one line of text, every bit of them.
[[nodiscard]] std::string note_of(const TensorStatistics& statistics);
/// The inverse; empty for anything else.
[[nodiscard]] std::optional<TensorStatistics> noted_statistics(const std::string& note);

}  // namespace gradclip
