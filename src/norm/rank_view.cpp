#include "gradclip/norm/rank_view.hpp"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <map>

#include "gradclip/norm/partial.hpp"

namespace gradclip {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double to_power(double x, NormOrder order) {
  return order.p == 2.0 ? x * x : std::pow(x, order.p);
}
double from_power(double x, NormOrder order) {
  return order.p == 2.0 ? std::sqrt(x) : std::pow(x, 1.0 / order.p);
}

/// The reference's combination of norms: m (Σ (n / m)^p)^(1/p), m the largest, a zero or infinite m replaced by 1 as
/// the divisor; NaN and infinity are decided explicitly.
double combine_norms(const std::vector<double>& norms, NormOrder order) {
  double largest = 0.0;
  for (const double norm : norms) {
    if (std::isnan(norm)) return kNan;
    largest = std::max(largest, norm);
  }
  if (order.infinite() || std::isinf(largest) || largest == 0.0) return largest;
  double sum = 0.0;
  for (const double norm : norms) sum += to_power(norm / largest, order);
  return largest * from_power(sum, order);
}

/// Which ranks' sums are added for a group as `rank` sees it, remembered by the rank's place among the copies.
class GroupReduction {
 public:
  GroupReduction(const Manifest& manifest, const ShardSums& sums, NormOrder order)
      : manifest_(manifest), order_(order) {
    for (const ShardGroup& group : sums.groups) {
      std::vector<bool> varies;
      bool partial = false;
      for (const Placement& placement : group.placements) {
        varies.push_back(placement.kind != Placement::Kind::replicate);
        partial = partial || placement.kind == Placement::Kind::partial;
      }
      varies_.push_back(std::move(varies));
      full_.push_back(partial);
      meshes_.push_back(group.mesh);
    }
    full_sums_.resize(sums.groups.size());
    for (std::size_t p = 0; p < sums.group_of.size(); ++p) {
      if (full_[sums.group_of[p]]) add(full_sums_[sums.group_of[p]], sums.parameters[p], order);
    }
  }

  [[nodiscard]] bool by_full_tensors(std::uint32_t group) const { return full_[group]; }

  /// Identifies the set of ranks that `rank` reduces the group over.
  [[nodiscard]] std::uint64_t key(std::uint32_t group, std::int32_t rank) const {
    if (!meshes_[group]) return static_cast<std::uint64_t>(rank);
    const DeviceMesh& mesh = manifest_.meshes[*meshes_[group]];
    const Coordinate at = mesh.coordinate(rank);
    std::uint64_t key = 0;
    for (std::size_t d = 0; d < at.size(); ++d) {
      if (!varies_[group][d])
        key = key * static_cast<std::uint64_t>(mesh.shape()[d]) + static_cast<std::uint64_t>(at[d]);
    }
    return key;
  }

  /// The ranks themselves, in coordinate order.
  [[nodiscard]] std::vector<std::int32_t> ranks(std::uint32_t group, std::int32_t rank) const {
    if (!meshes_[group]) return {rank};
    const DeviceMesh& mesh = manifest_.meshes[*meshes_[group]];
    return mesh.ranks_along(varies_[group], mesh.coordinate(rank));
  }

  using BySource = std::map<std::pair<std::int32_t, std::uint32_t>, const TensorStatistics*>;

  /// The group's sum as rank sees it, over the sums of all ranks.
  const TensorStatistics& reduced(std::uint32_t group, std::int32_t rank, const BySource& sources,
                                  std::map<std::pair<std::uint32_t, std::uint64_t>, TensorStatistics>& memory) const {
    if (full_[group]) return full_sums_[group];
    const auto [place, is_new] = memory.try_emplace({group, key(group, rank)});
    if (is_new) {
      for (const std::int32_t source : ranks(group, rank)) {
        const auto found = sources.find({source, group});
        if (found != sources.end()) add(place->second, *found->second, order_);
      }
    }
    return place->second;
  }

 private:
  const Manifest& manifest_;
  NormOrder order_;
  std::vector<std::vector<bool>> varies_;
  std::vector<bool> full_;
  std::vector<std::optional<std::size_t>> meshes_;
  std::vector<TensorStatistics> full_sums_;
};

GroupReduction::BySource by_source(const std::vector<RankGroupSum>& sums) {
  GroupReduction::BySource sources;
  for (const RankGroupSum& sum : sums) sources[{sum.rank, sum.group}] = &sum.statistics;
  return sources;
}

/// Groups that each recorded rank takes part in, ascending.
std::map<std::int32_t, std::vector<std::uint32_t>> groups_by_rank(const std::vector<RankGroupSum>& sums) {
  std::map<std::int32_t, std::vector<std::uint32_t>> groups;
  for (const RankGroupSum& sum : sums) groups[sum.rank].push_back(sum.group);
  for (auto& [rank, list] : groups) std::sort(list.begin(), list.end());
  return groups;
}

/// The ranks of `rank`'s pipeline group in stage order; itself alone without pp.
std::vector<std::int32_t> pipeline_ranks(const Manifest& manifest, const PipelineView& pipeline, std::int32_t rank) {
  if (!pipeline.enabled || !manifest.meshes[pipeline.device_mesh].contains(rank)) return {rank};
  const DeviceMesh& mesh = manifest.meshes[pipeline.device_mesh];
  std::vector<bool> varies(mesh.dimensions(), false);
  varies[pipeline.dimension] = true;
  return mesh.ranks_along(varies, mesh.coordinate(rank));
}

/// Total of every recorded rank that holds parameters, exactly.
std::map<std::int32_t, double> exact_totals(const Manifest& manifest, NormOrder order, const ShardSums& sums,
                                            const PipelineView& pipeline) {
  const GroupReduction reduction(manifest, sums, order);
  const auto sources = by_source(sums.rank_sums);
  std::map<std::pair<std::uint32_t, std::uint64_t>, TensorStatistics> memory;
  std::map<std::int32_t, TensorStatistics> of_stage;
  for (const auto& [rank, groups] : groups_by_rank(sums.rank_sums)) {
    TensorStatistics& stage = of_stage[rank];
    for (const std::uint32_t group : groups) add(stage, reduction.reduced(group, rank, sources, memory), order);
  }
  std::map<std::int32_t, double> totals;
  for (const auto& [rank, own] : of_stage) {
    TensorStatistics all;
    for (const std::int32_t stage : pipeline_ranks(manifest, pipeline, rank)) {
      const auto found = of_stage.find(stage);
      if (found != of_stage.end()) add(all, found->second, order);
    }
    totals[rank] = all.norm(order);
  }
  return totals;
}

/// The reference's sums over the full tensors of Partial parameters, by group.
struct FullTensorTerms {
  std::vector<double> largest;
  std::vector<ScaledSum> terms;
};

FullTensorTerms full_tensor_terms(Run& run, const ParameterFactors& factors, NormOrder order, const ShardSums& sums,
                                  const Absences& absences, const GroupReduction& reduction) {
  const Manifest& manifest = run.dump.manifest();
  FullTensorTerms result{std::vector<double>(sums.groups.size(), 0.0), std::vector<ScaledSum>(sums.groups.size())};
  bool any = false;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const std::uint32_t group = sums.group_of[p];
    if (!reduction.by_full_tensors(group)) continue;
    any = true;
    // Rounding is monotone: the largest of the rounded is the largest rounded.
    const double largest = round_through(manifest.parameters[p].dtype, sums.parameters[p].max_abs);
    result.largest[group] = std::max(result.largest[group], largest);
  }
  if (!any || order.infinite()) return result;
  std::vector<double> normalizers(manifest.parameters.size(), 1.0);
  for (std::size_t p = 0; p < normalizers.size(); ++p) {
    const double largest = result.largest[sums.group_of[p]];
    if (largest > 0.0 && std::isfinite(largest)) normalizers[p] = largest;
  }
  const FactorsOf factors_of = [&](std::size_t p, std::int32_t) {
    ScaleFactors one = factors.of[p];
    one.zero_nonfinite = factors.zero_nonfinite;
    return one;
  };
  const std::vector<TensorStatistics> terms =
      reference_terms_of_full_tensors(run, factors_of, order, absences, normalizers);
  for (std::size_t p = 0; p < terms.size(); ++p) {
    ScaledSum& sum = result.terms[sums.group_of[p]];
    sum = add(sum, terms[p].powers, order.p);
  }
  return result;
}

/// The same with the reference's own terms, combined by its own rule.
std::map<std::int32_t, double> reference_totals(Run& run, const ParameterFactors& factors, NormOrder order,
                                                const ShardSums& sums, const Absences& absences,
                                                const PipelineView& pipeline) {
  const Manifest& manifest = run.dump.manifest();
  const GroupReduction reduction(manifest, sums, order);
  std::map<std::pair<std::uint32_t, std::uint64_t>, TensorStatistics> magnitudes, terms;
  const auto exact_sources = by_source(sums.rank_sums);
  const auto normalizer = [&](std::int32_t rank, std::uint32_t group) {
    const TensorStatistics& seen = reduction.reduced(group, rank, exact_sources, magnitudes);
    return seen.nonfinite() != 0 || seen.max_abs == 0.0 ? 1.0 : seen.max_abs;
  };
  std::vector<RankGroupSum> term_sums;
  if (!order.infinite()) term_sums = sum_reference_terms(run, factors, order, sums, normalizer);
  const auto term_sources = by_source(term_sums);

  const FullTensorTerms full_tensors = full_tensor_terms(run, factors, order, sums, absences, reduction);
  const auto group_norm = [&](std::int32_t rank, std::uint32_t group) {
    const TensorStatistics& seen = reduction.reduced(group, rank, exact_sources, magnitudes);
    if (seen.nan != 0) return kNan;
    if (seen.nonfinite() != 0) return kInfinity;
    const bool full = reduction.by_full_tensors(group);
    const double largest = full ? full_tensors.largest[group] : seen.max_abs;
    if (order.infinite()) return largest;
    const ScaledSum powers =
        full ? full_tensors.terms[group] : reduction.reduced(group, rank, term_sources, terms).powers;
    return largest * from_power(std::ldexp(powers.sum, static_cast<int>(order.p * powers.exponent)), order);
  };
  std::map<std::int32_t, double> of_stage;
  for (const auto& [rank, groups] : groups_by_rank(sums.rank_sums)) {
    std::vector<double> norms;
    for (const std::uint32_t group : groups) norms.push_back(group_norm(rank, group));
    of_stage[rank] = combine_norms(norms, order);
  }
  if (!pipeline.enabled) return of_stage;
  std::map<std::int32_t, double> totals;
  for (const auto& [rank, own] : of_stage) {
    std::vector<double> norms;
    for (const std::int32_t stage : pipeline_ranks(manifest, pipeline, rank)) {
      const auto found = of_stage.find(stage);
      if (found != of_stage.end()) norms.push_back(found->second);
    }
    totals[rank] = combine_norms(norms, order);
  }
  return totals;
}

RankTotal torch_total(const RankTorchSum& sum, NormOrder order) {
  RankTotal result{0.0, sum.dtype, {sum.rank}};
  if (sum.nan) {
    result.total = kNan;
  } else if (sum.inf) {
    result.total = kInfinity;
  } else {
    double total = order.infinite() ? sum.largest : root(sum.powers, order);
    const bool overflows = sum.dtype != DType::float64 && !order.infinite() && to_power(total, order) > FLT_MAX;
    result.total = overflows ? kInfinity : round_through(sum.dtype, total);
  }
  return result;
}

/// NaNs are one total, whatever their bits.
std::uint64_t identity(const RankTotal& total) {
  return std::isnan(total.total) ? ~std::uint64_t{0} : std::bit_cast<std::uint64_t>(total.total);
}

void collect(ReferenceView& view, const RankTotal& one, std::map<std::uint64_t, std::size_t>& known) {
  const auto [place, is_new] = known.emplace(identity(one), view.totals.size());
  if (is_new) view.totals.push_back({one.total, one.dtype, {}});
  for (const std::int32_t rank : one.ranks) {
    view.totals[place->second].ranks.push_back(rank);
    view.total_of_rank[static_cast<std::size_t>(rank)] = static_cast<std::int32_t>(place->second);
  }
}

}  // namespace

ReferenceView reference_view(Run& run, const ParameterFactors& factors, NormOrder order, Numerics numerics,
                             const ShardSums& sums, const Absences& absences, const PipelineView& pipeline) {
  const Manifest& manifest = run.dump.manifest();
  ReferenceView view;
  view.total_of_rank.assign(static_cast<std::size_t>(manifest.world_size), -1);
  view.arithmetic = name(numerics);

  std::map<std::uint64_t, std::size_t> known;
  if (numerics == Numerics::torch) {
    for (const RankTorchSum& sum : sums.torch_sums) collect(view, torch_total(sum, order), known);
    return view;
  }
  const auto totals = numerics == Numerics::exact ? exact_totals(manifest, order, sums, pipeline)
                                                  : reference_totals(run, factors, order, sums, absences, pipeline);
  for (const auto& [rank, total] : totals) collect(view, {total, DType::float64, {rank}}, known);
  return view;
}

}  // namespace gradclip
