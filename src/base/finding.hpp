#pragma once
// What any room may discover about a dump and a person should hear of.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gradclip {

/// One entry of the report's "findings" (docs/reports.md lists the kinds).
struct Finding {
  std::string kind;                                ///< "replicas-differ", "ranks-disagree", ...
  std::string parameter;                           ///< empty where it concerns the whole dump
  std::vector<std::int32_t> ranks;                 ///< recorded ranks, ascending
  std::optional<std::vector<std::int64_t>> index;  ///< global coordinates, one per dimension
  std::optional<double> value;                     ///< what the kind says it is
  std::string message;                             ///< one sentence
};

[[nodiscard]] inline bool has_kind(std::span<const Finding> findings, std::string_view kind) {
  return std::any_of(findings.begin(), findings.end(), [&](const Finding& finding) { return finding.kind == kind; });
}

}  // namespace gradclip
