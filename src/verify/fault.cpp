#include "gradclip/verify/fault.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>

#include "gradclip/dump/posix_file.hpp"
#include "gradclip/verify/check_message.hpp"

namespace gradclip {
namespace {

/// Whether "PLACE TEXT" is a sentence: TEXT begins with what is said of the place.
bool says_of_place(std::string_view text) {
  constexpr std::string_view kVerbs[] = {"begins", "cannot", "declares", "does",  "ends",   "has",    "holds", "is",
                                         "keeps",  "lies",   "makes",    "needs", "refers", "stands", "takes"};
  return std::find(std::begin(kVerbs), std::end(kVerbs), text.substr(0, text.find(' '))) != std::end(kVerbs);
}

auto place(const Fault& fault) {
  return std::tuple(severity(fault.kind), fault.parameter ? static_cast<std::int64_t>(*fault.parameter) : -1,
                    std::string_view(fault.name), fault.rank, std::string_view(fault.message));
}

bool is_one_finding(const Fault& a, const Fault& b) {
  const bool of_whole_file = !a.parameter && a.name.empty();
  return !of_whole_file && a.kind == b.kind && a.parameter == b.parameter && a.name == b.name;
}

}  // namespace

std::size_t severity(std::string_view kind) noexcept {
  return static_cast<std::size_t>(std::find(std::begin(kKindsWorstFirst), std::end(kKindsWorstFirst), kind) -
                                  std::begin(kKindsWorstFirst));
}

Fault fault_of(const ErrorText& text, std::int32_t rank, std::optional<std::size_t> parameter,
               std::string_view before) {
  Fault fault{std::string(text.kind.empty() ? kUnreadable : text.kind), rank, parameter, {}, std::string(before)};
  if (!before.empty()) fault.message += says_of_place(text.found) ? " " : ": ";
  fault.message += text.found;
  if (!text.expected.empty()) fault.message += "; expected " + text.expected;
  if (!text.advice.empty()) fault.message += "; " + text.advice;
  return fault;
}

std::vector<Fault> gather_faults(Communicator& comm, std::span<const Fault> mine) {
  std::string bytes;
  for (const Fault& fault : mine) put(bytes, fault);
  const std::vector<char> all = gather_values(comm, std::span<const char>(bytes));
  Taker taker({all.data(), all.size()});
  std::vector<Fault> faults;
  while (!taker.done()) faults.push_back(take_fault(taker));
  return faults;
}

std::vector<Finding> findings_of(const Manifest& manifest, std::vector<Fault> faults) {
  std::sort(faults.begin(), faults.end(), [](const Fault& a, const Fault& b) { return place(a) < place(b); });
  std::vector<Finding> findings;
  for (auto first = faults.begin(); first != faults.end();) {
    auto last = first + 1;
    while (last != faults.end() && is_one_finding(*first, *last)) ++last;
    std::set<std::int32_t> ranks, others;
    for (auto fault = first; fault != last; ++fault) {
      if (fault->rank >= 0) ranks.insert(fault->rank);
      if (fault->message != first->message) others.insert(fault->rank);
    }
    std::string message = first->message;
    if (!others.empty()) {
      message = fmt::format("on rank {} {}; likewise on {} more", first->rank, message, others.size());
    }
    findings.push_back({.kind = first->kind,
                        .parameter = first->parameter ? manifest.parameters[*first->parameter].name : first->name,
                        .ranks = {ranks.begin(), ranks.end()},
                        .index = {},
                        .value = {},
                        .message = std::move(message)});
    first = last;
  }
  return findings;
}

void sort_by_severity(std::vector<Finding>& findings) {
  std::stable_sort(findings.begin(), findings.end(),
                   [](const Finding& a, const Finding& b) { return severity(a.kind) < severity(b.kind); });
}

}  // namespace gradclip
