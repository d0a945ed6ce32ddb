#pragma once
// What only `check` takes.

#include <filesystem>

#include "gradclip/analysis/baseline_check.hpp"

namespace gradclip {

struct CheckLine {
  std::filesystem::path baseline;
  CheckOptions options;
};

}  // namespace gradclip
