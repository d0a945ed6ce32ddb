#include "gradclip/norm/findings.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace gradclip {

std::string named_ranks(std::span<const std::int32_t> ranks) {
  constexpr std::size_t kMost = 8;
  const std::span<const std::int32_t> shown = ranks.first(std::min(ranks.size(), kMost));
  return fmt::format("{} {}{}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(shown, ", "),
                     ranks.size() > kMost ? fmt::format(" and {} more", ranks.size() - kMost) : "");
}

std::string copies_differ(double largest, std::int32_t nan_rank, std::int32_t number_rank, std::int32_t first_rank) {
  if (nan_rank < 0) {
    return fmt::format("copies that should be equal differ by up to {:.6g}, first on rank {}", largest, first_rank);
  }
  std::string text = fmt::format("copies that should be equal differ: NaN on rank {} where rank {} has a number",
                                 nan_rank, number_rank);
  if (largest > 0.0) text += fmt::format(", numbers by up to {:.6g}", largest);
  return text + fmt::format(", first on rank {}", first_rank);
}

void report_nonfinite(const Manifest& manifest, const ShardSums& sums, bool zeroed, std::vector<Finding>& findings) {
  for (std::size_t p = 0; p < sums.parameters.size(); ++p) {
    // What was replaced by 0 in an addend is not seen in the combined value.
    const bool in_addends = zeroed && manifest.parameters[p].has_partial();
    const TensorStatistics& statistics = in_addends ? sums.addends[p] : sums.parameters[p];
    if (statistics.nonfinite() == 0) continue;
    const ParameterEntry& entry = manifest.parameters[p];
    findings.push_back(
        {.kind = "nonfinite",
         .parameter = entry.name,
         .ranks = {statistics.first_nonfinite_rank},
         .index = index_at(entry.shape, statistics.first_nonfinite),
         .value = static_cast<double>(statistics.nonfinite()),
         .message = fmt::format("{} NaN, {} +inf and {} -inf of {} elements{}", statistics.nan, statistics.posinf,
                                statistics.neginf, statistics.elements, zeroed ? ", replaced by 0" : "")});
  }
}

void report_coverage(const Manifest& manifest, std::size_t parameter, const ShardSums& sums, bool expert,
                     std::vector<Finding>& findings) {
  const ParameterEntry& entry = manifest.parameters[parameter];
  if (sums.none[parameter] != 0) return;
  const std::uint64_t found = sums.parameters[parameter].elements;
  const std::uint64_t expected = entry.elements * (entry.is_distinct(expert) ? entry.ranks.size() : 1);
  std::string message;
  if (!entry.has_partial() && found != expected) {
    message = fmt::format("the slices of all ranks have {} elements together; expected {}, the whole tensor", found,
                          expected);
  } else if (std::binary_search(sums.uncovered.begin(), sums.uncovered.end(), parameter)) {
    message = fmt::format(
        "the slices of all ranks hold some elements twice and others not at all, by {}; expected each element once",
        entry.flat_ranges.empty() ? "their global_offset or global_ranges" : R"("flat_ranges")");
  } else {
    return;
  }
  findings.push_back({.kind = "placement",
                      .parameter = entry.name,
                      .ranks = manifest.holders(entry),
                      .index = {},
                      .value = {},
                      .message = std::move(message)});
}

void report_undeclared(const Manifest& manifest, const std::vector<bool>& expert, std::vector<Finding>& findings) {
  std::vector<char> seen(static_cast<std::size_t>(manifest.world_size), 0);
  const ParameterEntry* first = nullptr;
  std::size_t count = 0, experts = 0;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const ParameterEntry& entry = manifest.parameters[p];
    if (entry.mesh || entry.copies != Copies::undeclared || entry.ranks.size() < 2) continue;
    if (first == nullptr) first = &entry;
    ++count;
    experts += expert[p] ? 1 : 0;
    for (const std::int32_t rank : entry.ranks) seen[static_cast<std::size_t>(rank)] = 1;
  }
  if (count == 0) return;
  std::vector<std::int32_t> ranks;
  for (std::int32_t rank = 0; rank < manifest.world_size; ++rank) {
    if (seen[static_cast<std::size_t>(rank)] != 0) ranks.push_back(rank);
  }
  findings.push_back(
      {.kind = "undeclared-plain-tensor",
       .parameter = first->name,
       .ranks = std::move(ranks),
       .index = {},
       .value = static_cast<double>(count),
       .message = fmt::format("{} plain tensor{} on several ranks without \"copies\" in the manifest: {} "
                              "taken as replicated, {} of experts as distinct",
                              count, count == 1 ? "" : "s", count - experts, experts)});
}

void report_disagreement(const ReferenceView& view, std::vector<Finding>& findings) {
  if (view.totals.size() < 2) return;
  std::vector<std::int32_t> ranks;
  double smallest = std::numeric_limits<double>::infinity(), largest = 0.0;
  std::vector<std::int32_t> nan;
  for (const RankTotal& total : view.totals) {
    ranks.insert(ranks.end(), total.ranks.begin(), total.ranks.end());
    if (std::isnan(total.total)) nan.insert(nan.end(), total.ranks.begin(), total.ranks.end());
    smallest = std::fmin(smallest, total.total);
    largest = std::fmax(largest, total.total);
  }
  std::sort(ranks.begin(), ranks.end());
  std::sort(nan.begin(), nan.end());
  const bool one_number = !nan.empty() && view.totals.size() == 2;
  const std::string numbers =
      one_number ? fmt::format("{:.9g}", smallest) : fmt::format("from {:.9g} to {:.9g}", smallest, largest);
  findings.push_back(
      {.kind = "ranks-disagree",
       .parameter = {},
       .ranks = std::move(ranks),
       .index = {},
       .value = !nan.empty() ? std::numeric_limits<double>::quiet_NaN() : largest - smallest,
       .message = fmt::format("the training step's ranks would have clipped by {} different totals, {}{}",
                              view.totals.size(), numbers, nan.empty() ? "" : ", and NaN on " + named_ranks(nan))});
}

void report_total(NormResult& result, Numerics numerics) {
  double total = result.total;
  for (const RankTotal& seen : result.reference.totals) {
    if (numerics != Numerics::exact && std::isfinite(total)) total = seen.total;
  }
  // Of a copy that does not count, too: in a rank's own total it does.
  if (std::isfinite(total) || has_kind(result.findings, "nonfinite")) return;
  result.findings.push_back({.kind = "total-nonfinite",
                             .parameter = {},
                             .ranks = {},
                             .index = {},
                             .value = total,
                             .message = fmt::format("the total norm for p = {} is {} although every gradient is finite",
                                                    result.order.p, std::isnan(total) ? "NaN" : "infinite")});
}

void report_nothing_seen(const TensorStatistics& total, std::vector<Finding>& findings) {
  if (total.elements != 0) return;
  findings.push_back({.kind = "nothing-seen",
                      .parameter = {},
                      .ranks = {},
                      .index = {},
                      .value = {},
                      .message = "the dump holds no gradient element, so the total is 0"});
}

}  // namespace gradclip
