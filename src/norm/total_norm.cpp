#include "gradclip/norm/total_norm.hpp"

#include <algorithm>
#include <set>

#include "gradclip/norm/findings.hpp"
#include "gradclip/norm/histograms.hpp"
#include "gradclip/norm/partial.hpp"
#include "gradclip/norm/rank_view.hpp"
#include "gradclip/norm/replicas.hpp"
#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {
namespace {

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
                             const PipelineView& pipeline, bool histograms) {
  const Manifest& manifest = run.dump.manifest();
  const bool by_object = numerics == Numerics::automodel || numerics == Numerics::automodel_cpu;
  std::optional<HistogramCollector> collector;
  if (histograms) collector.emplace(manifest, factors.expert, run.stream.options().threads);
  HistogramCollector* const counts = collector ? &*collector : nullptr;
  ShardSums sums = sum_shards(run, factors, order, by_object, counts);
  const Absences absences(run, factors.expert, sums.none_shards);
  const FactorsOf factors_of = [&](std::size_t p, std::int32_t) {
    ScaleFactors one = factors.of[p];
    one.zero_nonfinite = factors.zero_nonfinite;  // an addend that is not a number must not spoil the others
    return one;
  };
  const std::vector<PartialSliceSum> slices =
      combine_partials(run, factors_of, order, absences, sums.parameters, counts);

  NormResult result;
  if (counts != nullptr) {
    counts->count_stand_ins(run, factors, absences);
    result.histograms = counts->gather(run.comm, factors.zero_nonfinite);
  }
  result.order = order;
  result.ranks = sums.counted;
  const std::vector<bool> counted = counted_entries(manifest);
  for (const PartialSliceSum& slice : slices) {
    if (!counted[slice.parameter]) continue;
    add(result.ranks[slice.rank], factors.zero_nonfinite ? with_nonfinite_zeroed(slice.statistics) : slice.statistics,
        order);
  }
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    report_coverage(manifest, p, sums, factors.expert[p], result.findings);
  }
  report_nonfinite(manifest, sums, factors.zero_nonfinite, result.findings);
  if (factors.zero_nonfinite) {
    for (TensorStatistics& parameter : sums.parameters) parameter = with_nonfinite_zeroed(parameter);
  }
  share_out(manifest, sums, result);
  result.reference = reference_view(run, factors, order, numerics, sums, absences, pipeline);

  std::vector<Finding> tied;
  std::vector<Suspect> suspects = tied_suspects(run, sums, factors, order, tied);
  suspects.insert(suspects.end(), sums.suspects.begin(), sums.suspects.end());
  report_nothing_seen(result.statistics, result.findings);
  report_disagreement(result.reference, result.findings);
  for (Finding& finding : compare_replicas(run, suspects, sums.absent, factors.expert))
    result.findings.push_back(std::move(finding));
  result.findings.insert(result.findings.end(), tied.begin(), tied.end());
  report_undeclared(manifest, factors.expert, result.findings);
  report_total(result, numerics);
  // Of copies that do not count, too.
  std::stable_partition(result.findings.begin(), result.findings.end(), [](const Finding& finding) {
    return finding.kind == "nonfinite" || finding.kind == "total-nonfinite";
  });
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
