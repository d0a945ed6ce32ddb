#include "gradclip/verify/fault.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <tuple>

#include "gradclip/dump/posix_file.hpp"

namespace gradclip {
namespace {

void put(std::string& to, std::int64_t number) {
  char bytes[sizeof number];
  std::memcpy(bytes, &number, sizeof number);
  to.append(bytes, sizeof number);
}

void put(std::string& to, const std::string& text) {
  put(to, static_cast<std::int64_t>(text.size()));
  to += text;
}

/// Takes apart what put() made, from a process of the same program.
class Taker {
 public:
  explicit Taker(std::string_view bytes) : bytes_(bytes) {}

  [[nodiscard]] bool done() const noexcept { return bytes_.empty(); }
  std::int64_t number() {
    std::int64_t number = 0;
    GRADCLIP_CHECK(bytes_.size() >= sizeof number, "faults of another process end early");
    std::memcpy(&number, bytes_.data(), sizeof number);
    bytes_.remove_prefix(sizeof number);
    return number;
  }
  std::string text() {
    const auto size = static_cast<std::size_t>(number());
    GRADCLIP_CHECK(size <= bytes_.size(), "faults of another process end early");
    std::string text(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return text;
  }

 private:
  std::string_view bytes_;
};

/// Whether "PLACE TEXT" is a sentence: TEXT begins with what is said of the place.
bool says_of_place(std::string_view text) {
  constexpr std::string_view kVerbs[] = {"begins", "cannot", "declares", "does",  "ends",   "has",   "holds",
                                         "is",     "keeps",  "lies",     "needs", "refers", "stands"};
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
  for (const Fault& fault : mine) {
    put(bytes, fault.kind);
    put(bytes, std::int64_t{fault.rank});
    put(bytes, fault.parameter ? static_cast<std::int64_t>(*fault.parameter) : std::int64_t{-1});
    put(bytes, fault.name);
    put(bytes, fault.message);
  }
  const std::vector<char> all = gather_values(comm, std::span<const char>(bytes));
  Taker taker({all.data(), all.size()});
  std::vector<Fault> faults;
  while (!taker.done()) {
    Fault& fault = faults.emplace_back();
    fault.kind = taker.text();
    fault.rank = static_cast<std::int32_t>(taker.number());
    if (const std::int64_t parameter = taker.number(); parameter >= 0) {
      fault.parameter = static_cast<std::size_t>(parameter);
    }
    fault.name = taker.text();
    fault.message = taker.text();
  }
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
