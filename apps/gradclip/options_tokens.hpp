#pragma once
// How labels are counted: what `tokens` takes, and --num-label-tokens auto.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/training/label_tokens.hpp"

namespace gradclip {

struct LabelLine {
  bool count = false;                        ///< --num-label-tokens auto
  std::optional<std::int64_t> ignore_index;  ///< empty: as recorded
  std::vector<std::string> dp_axes;          ///< empty: by their usual names
};

/// With the manifest's "training" where the line says nothing. @param pp_axis  of the command line
[[nodiscard]] LabelOptions label_options(const LabelLine& line, const std::optional<std::string>& pp_axis,
                                         const TrainingRecord& recorded);

/// "dp_replicate,dp_shard". Empty if a name is.
[[nodiscard]] std::vector<std::string> parse_axes(std::string_view text);

}  // namespace gradclip
