#pragma once
// What only `diff` takes.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "gradclip/analysis/diff.hpp"

namespace gradclip {

/// The most that --max-elements takes: they are kept for every parameter.
inline constexpr std::int64_t kMostWorstElements = 1000;

struct DiffLine {
  std::filesystem::path other;  ///< B
  DiffRule rule;
  std::size_t max_elements = 0;
  std::optional<std::filesystem::path> map;
  std::optional<std::string> only;
};

/// With the name map read and the expression compiled. Errors: Error(usage) for either.
[[nodiscard]] DiffOptions diff_options(const DiffLine& line);

}  // namespace gradclip
