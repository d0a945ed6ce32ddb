#pragma once
// What only `merge` takes.

#include <optional>
#include <string>

#include "gradclip/analysis/merge.hpp"

namespace gradclip {

struct MergeLine {
  MergeFormat format = MergeFormat::dump;
  std::optional<std::string> only;
};

}  // namespace gradclip
