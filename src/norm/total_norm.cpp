#include "gradclip/norm/total_norm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "gradclip/norm/partial.hpp"
#include "gradclip/norm/rank_view.hpp"
#include "gradclip/norm/replicas.hpp"
#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {
namespace {

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

void report_undeclared(const Manifest& manifest, const ParameterFactors& factors, std::vector<Finding>& findings) {
  std::vector<char> seen(static_cast<std::size_t>(manifest.world_size), 0);
  const ParameterEntry* first = nullptr;
  std::size_t count = 0, experts = 0;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const ParameterEntry& entry = manifest.parameters[p];
    if (entry.mesh || entry.copies != Copies::undeclared || entry.ranks.size() < 2) continue;
    if (first == nullptr) first = &entry;
    ++count;
    experts += factors.expert[p] ? 1 : 0;
    for (const std::int32_t rank : entry.ranks) seen[static_cast<std::size_t>(rank)] = 1;
  }
  if (count == 0) return;
  std::vector<std::int32_t> ranks;
  for (std::int32_t rank = 0; rank < manifest.world_size; ++rank) {
    if (seen[static_cast<std::size_t>(rank)] != 0) ranks.push_back(rank);
  }
  findings.push_back({.kind = "undeclared-plain-tensor",
                      .parameter = first->name,
                      .ranks = std::move(ranks),
                      .index = {},
                      .value = static_cast<double>(count),
                      .message = fmt::format("{} plain tensors on several ranks without \"copies\" in the manifest: {} "
                                             "taken as replicated, {} of experts as distinct",
                                             count, count - experts, experts)});
}

void report_disagreement(const ReferenceView& view, std::vector<Finding>& findings) {
  if (view.totals.size() < 2) return;
  std::vector<std::int32_t> ranks;
  double smallest = std::numeric_limits<double>::infinity(), largest = 0.0;
  bool nan = false;
  for (const RankTotal& total : view.totals) {
    ranks.insert(ranks.end(), total.ranks.begin(), total.ranks.end());
    nan = nan || std::isnan(total.total);
    smallest = std::fmin(smallest, total.total);
    largest = std::fmax(largest, total.total);
  }
  std::sort(ranks.begin(), ranks.end());
  findings.push_back(
      {.kind = "ranks-disagree",
       .parameter = {},
       .ranks = std::move(ranks),
       .index = {},
       .value = nan ? std::numeric_limits<double>::quiet_NaN() : largest - smallest,
       .message = fmt::format("the training step's ranks would have clipped by {} different totals, from "
                              "{:.9g} to {:.9g}{}",
                              view.totals.size(), smallest, largest, nan ? ", and NaN" : "")});
}

void share_out(const Manifest& manifest, const ShardSums& sums, NormResult& result) {
  const std::vector<bool> counted = counted_entries(manifest);
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    ParameterNorm parameter{sums.parameters[p], sums.parameters[p].norm(result.order), 0.0, counted[p], sums.none[p]};
    if (counted[p]) add(result.statistics, parameter.statistics, result.order);
    result.parameters.push_back(parameter);
  }
  result.total = result.statistics.norm(result.order);
  for (ParameterNorm& parameter : result.parameters) {
    if (parameter.counted) parameter.share = share_of(parameter.norm, result.total, result.order);
  }
}

}  // namespace

std::string_view name(Numerics numerics) noexcept {
  switch (numerics) {
    case Numerics::exact:
      return "exact";
    case Numerics::automodel:
      return "automodel";
    case Numerics::automodel_cpu:
      return "automodel-cpu";
    case Numerics::torch:
      return "torch";
  }
  return "exact";
}

std::vector<bool> counted_entries(const Manifest& manifest) {
  std::vector<bool> counted;
  std::set<std::string> seen;
  for (const ParameterEntry& parameter : manifest.parameters) {
    counted.push_back(!parameter.tied || seen.insert(*parameter.tied).second);
  }
  return counted;
}

NormResult measure_gradients(Run& run, const ParameterFactors& factors, NormOrder order, Numerics numerics,
                             const PipelineView& pipeline) {
  const Manifest& manifest = run.dump.manifest();
  const bool by_object = numerics == Numerics::automodel || numerics == Numerics::automodel_cpu;
  ShardSums sums = sum_shards(run, factors, order, by_object);
  const Absences absences(run, factors.expert, sums.none_shards);
  const FactorsOf factors_of = [&](std::size_t p, std::int32_t) {
    ScaleFactors one = factors.of[p];
    one.zero_nonfinite = factors.zero_nonfinite;  // an addend that is not a number must not spoil the others
    return one;
  };
  combine_partials(run, factors_of, order, absences, sums.parameters);

  NormResult result;
  result.order = order;
  report_nonfinite(manifest, sums, factors.zero_nonfinite, result.findings);
  if (factors.zero_nonfinite) {
    for (TensorStatistics& parameter : sums.parameters) parameter = with_nonfinite_zeroed(parameter);
  }
  share_out(manifest, sums, result);
  result.reference = reference_view(run, factors, order, numerics, sums, absences, pipeline);

  std::vector<Finding> tied;
  std::vector<Suspect> suspects = tied_suspects(run, sums, factors, order, tied);
  suspects.insert(suspects.end(), sums.suspects.begin(), sums.suspects.end());
  if (result.statistics.elements == 0) {
    result.findings.push_back({.kind = "nothing-seen",
                               .parameter = {},
                               .ranks = {},
                               .index = {},
                               .value = {},
                               .message = "the dump holds no gradient element, so the total is 0"});
  }
  report_disagreement(result.reference, result.findings);
  for (Finding& finding : compare_replicas(run, suspects, sums.absent)) result.findings.push_back(std::move(finding));
  result.findings.insert(result.findings.end(), tied.begin(), tied.end());
  report_undeclared(manifest, factors, result.findings);
  return result;
}

double measured_total(Run& run, NormOrder order, std::span<const RankStatistics> mine, const FactorsOf& factors_of,
                      const Absences& absences) {
  TensorStatistics total;
  std::vector<RankStatistics> all = gather_values(run.comm, mine);
  std::stable_sort(all.begin(), all.end(),
                   [](const RankStatistics& a, const RankStatistics& b) { return a.rank < b.rank; });
  for (const RankStatistics& rank : all) add(total, rank.statistics, order);
  std::vector<TensorStatistics> partial(run.dump.manifest().parameters.size());
  combine_partials(run, factors_of, order, absences, partial);
  const std::vector<bool> counted = counted_entries(run.dump.manifest());
  for (std::size_t p = 0; p < partial.size(); ++p) {
    if (counted[p]) add(total, partial[p], order);
  }
  return total.norm(order);
}

}  // namespace gradclip
