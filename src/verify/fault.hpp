#pragma once
// What is wrong with one recorded rank's file, and how faults of many ranks become the findings of one dump.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/base/finding.hpp"
#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/manifest.hpp"

namespace gradclip {

/// The kinds of findings in the order in which `verify` lists them, worst first: what cannot be read, what is not what
/// was recorded, what contradicts itself, what is suspicious.
inline constexpr std::string_view kKindsWorstFirst[] = {"unfinished",      "manifest",
                                                        "missing",         "unreadable",
                                                        "checksum",        "dtype",
                                                        "shape",           "placement",
                                                        "extra",           "nonfinite",
                                                        "replicas-differ", "tied-differ",
                                                        "ranks-disagree",  "undeclared-plain-tensor",
                                                        "all-zero",        "nothing-seen"};

/// Position of a kind in that order.
[[nodiscard]] std::size_t severity(std::string_view kind) noexcept;

/// One thing that is wrong on one recorded rank.
struct Fault {
  std::string kind;
  std::int32_t rank = -1;                ///< -1: the dump itself
  std::optional<std::size_t> parameter;  ///< index into Manifest::parameters; empty: the whole file
  std::string name;                      ///< of something that is no parameter of the manifest; else empty
  std::string message;
};

/// A fault from an error of bad input: its kind, and its text without the place, which the fault says itself.
/// @param before  what else of the place its message is to say
[[nodiscard]] Fault fault_of(const ErrorText& text, std::int32_t rank, std::optional<std::size_t> parameter,
                             std::string_view before = {});

/// All processes' faults in process order. Collective.
[[nodiscard]] std::vector<Fault> gather_faults(Communicator& comm, std::span<const Fault> mine);

/// Findings of the faults: of one parameter (or other name) one for each kind, with the message of its lowest rank;
/// those of whole files one each. A fault's place among all others is what a sort by (parameter, rank) gives it, so
/// that the number of processes does not show.
[[nodiscard]] std::vector<Finding> findings_of(const Manifest& manifest, std::vector<Fault> faults);

/// Worst kinds first; the order within a kind stays.
void sort_by_severity(std::vector<Finding>& findings);

}  // namespace gradclip
