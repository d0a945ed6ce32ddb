#include "gradclip/norm/shard_sums.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <map>
#include <tuple>

#include "gradclip/base/dispatch.hpp"
#include "gradclip/norm/coverage_check.hpp"
#include "gradclip/norm/histograms.hpp"
#include "gradclip/norm/result_exchange.hpp"
#include "gradclip/training/offload.hpp"

namespace gradclip {
namespace {

/// Measures one model part's shards of the parameters, or all, that this process's recorded ranks hold.
void measure_part(Run& run, ParameterRange parameters, std::optional<std::int64_t> model_part,
                  const FactorsOf& factors_of, const StatisticsRequest& request, const std::vector<char>& fingerprinted,
                  HistogramCollector* histograms, CoverageCheck* coverage, std::vector<ShardResult>& results) {
  const Manifest& manifest = run.dump.manifest();
  const std::span<const std::int32_t> mine = run.plan.ranks(run.comm.process());
  const std::size_t batch = std::min<std::size_t>(kRanksPerBatch, run.dump.capacity());
  for (std::size_t first = 0; first < mine.size(); first += batch) {
    const std::span ranks = mine.subspan(first, std::min(batch, mine.size() - first));
    TaskList list = list_tasks(run.dump, parameters, ranks, factors_of, model_part);
    const std::size_t base = results.size();
    for (ShardTask& task : list.tasks) {
      task.fingerprint = !fingerprinted.empty() && fingerprinted[task.parameter] != 0;
      const std::uint64_t seed = std::bit_cast<std::uint32_t>(list.factors[task.factors].scale_inv);
      results.push_back({static_cast<std::uint32_t>(task.parameter), task.rank, seed, 0, {}});
      if (coverage != nullptr) coverage->add(task);
    }
    StoredSink counting;
    if (histograms != nullptr) {
      histograms->choose(list.tasks);
      counting = histograms->sink(list.tasks, list.factors);
    }
    const ChunkSink summing = [&](const MeasuredChunk& chunk) {
      ShardResult& result = results[base + chunk.task];
      append(result.statistics, chunk.statistics, chunk.count, chunk.position, request.order);
      if (list.tasks[chunk.task].fingerprint) {
        result.fingerprint = XXH3_64bits_withSeed(&chunk.fingerprint, sizeof chunk.fingerprint, result.fingerprint);
      }
    };
    run.stream.measure(list.tasks, list.factors, request, summing, counting);
    if (histograms != nullptr) histograms->finish_pass();
    for (std::size_t i = 0; i < list.tasks.size(); ++i) {
      TensorStatistics& statistics = results[base + i].statistics;
      if (statistics.first_nonfinite == kNowhere) continue;
      const ShardTask& task = list.tasks[i];
      const std::vector<std::int64_t> index = task.shard->layout.global_index(statistics.first_nonfinite);
      statistics.first_nonfinite = global_position(manifest.parameters[task.parameter].shape, index);
      statistics.first_nonfinite_rank = task.rank;
    }
    for (const NoneShard& none : list.none) {
      results.push_back({static_cast<std::uint32_t>(none.parameter), none.rank, 0, 1, {}});
    }
  }
}

/// Measures the shards of the parameters that this process's recorded ranks hold; rank-major, in manifest order.
std::vector<ShardResult> measure_shards(Run& run, ParameterRange parameters, const FactorsOf& factors_of,
                                        const StatisticsRequest& request, const std::vector<char>& fingerprinted,
                                        HistogramCollector* histograms = nullptr, CoverageCheck* coverage = nullptr) {
  std::vector<ShardResult> results;
  for (const std::optional<std::int64_t> part : parts_in_turn(run.stream, run.dump.manifest(), parameters)) {
    const ScopedModuleOffloading on_device(run.stream.storage().part(part.value_or(0)), run.backend, part.has_value());
    measure_part(run, parameters, part, factors_of, request, fingerprinted, histograms, coverage, results);
  }
  // Sums are formed in this order, whatever the order of the parts.
  std::sort(results.begin(), results.end(), [](const ShardResult& a, const ShardResult& b) {
    return std::pair(a.rank, a.parameter) < std::pair(b.rank, b.parameter);
  });
  return results;
}

void group_parameters(const Manifest& manifest, bool by_object, ShardSums& sums) {
  std::map<std::tuple<std::int64_t, std::int64_t, std::string>, std::uint32_t> known;
  for (const ParameterEntry& parameter : manifest.parameters) {
    const bool sharded = parameter.mesh.has_value();
    const std::tuple key{sharded ? static_cast<std::int64_t>(*parameter.mesh) : -1,
                         by_object ? parameter.mesh_object : 0,
                         sharded ? to_string(parameter.placements) : std::string()};
    const auto [place, is_new] = known.emplace(key, static_cast<std::uint32_t>(sums.groups.size()));
    if (is_new) sums.groups.push_back({parameter.mesh, parameter.placements});
    sums.group_of.push_back(place->second);
  }
}

/// One parameter at its owner: all recorded ranks' results, ascending by rank.
class ParameterFold {
 public:
  ParameterFold(const Manifest& manifest, std::size_t parameter, std::span<const ShardResult> results, bool expert,
                NormOrder order)
      : manifest_(manifest),
        entry_(manifest.parameters[parameter]),
        parameter_(static_cast<std::uint32_t>(parameter)),
        results_(results),
        expert_(expert),
        order_(order) {}

  /// @param addends  receives what `total` does for a Partial parameter, whose addends are combined elsewhere
  void fold(TensorStatistics& total, TensorStatistics& addends, std::vector<Suspect>& suspects,
            std::vector<AbsentCopy>& absent, std::vector<StandIn>& stand_ins) {
    const bool partial = entry_.has_partial();
    for (const ShardResult& result : results_) {
      if (!is_counted_copy(manifest_, entry_, result.rank, expert_)) continue;
      const ShardResult* counted = compare_copies(result, suspects, absent);
      if (counted == nullptr) continue;
      if (partial) check_addend(*counted);
      add(partial ? addends : total, counted->statistics, order_);
      if (counted->rank != result.rank && !partial)
        stand_ins.push_back({parameter_, counted->rank, counted->statistics});
    }
  }

 private:
  /// The copy that counts: `declared`, or the next one whose gradient is not None. Copies that differ become suspects.
  const ShardResult* compare_copies(const ShardResult& declared, std::vector<Suspect>& suspects,
                                    std::vector<AbsentCopy>& absent) {
    if (!has_copies(manifest_, entry_, expert_)) return declared.none != 0 ? nullptr : &declared;
    const std::vector<std::int32_t> copies = manifest_.role(entry_, declared.rank, expert_).copies;
    const ShardResult* counted = nullptr;
    std::vector<std::int32_t> none;
    for (const std::int32_t rank : copies) {
      const ShardResult& copy = of_rank(rank);
      if (copy.none != 0) {
        none.push_back(rank);
      } else if (counted == nullptr) {
        counted = &copy;
      } else if (copy.statistics.elements != counted->statistics.elements) {
        refuse_sizes(copy,
                     fmt::format("{} elements, as rank {}'s copy has", counted->statistics.elements, counted->rank));
      } else if (copy.fingerprint != counted->fingerprint) {
        suspects.push_back(
            {parameter_, parameter_, counted->rank, rank, counted->statistics.elements, copy.fingerprint});
      }
    }
    if (counted != nullptr) {
      for (const std::int32_t rank : none) absent.push_back({parameter_, rank});
    }
    return counted;
  }

  void check_addend(const ShardResult& addend) const {
    const std::uint64_t elements = manifest_.layout(entry_, addend.rank).elements();
    if (addend.statistics.elements != elements) {
      refuse_sizes(addend, fmt::format("{} elements: the placements', in which the other addends lie too", elements));
    }
  }

  [[noreturn]] void refuse_sizes(const ShardResult& result, std::string expected) const {
    throw Error(ExitCode::bad_input, {.where = fmt::format("parameter {} on rank {}", quoted(entry_.name), result.rank),
                                      .found = fmt::format("{} recorded elements", result.statistics.elements),
                                      .expected = std::move(expected),
                                      .advice = "see the dataset's global_ranges or global_offset"});
  }

  const ShardResult& of_rank(std::int32_t rank) const {
    const auto place = std::lower_bound(results_.begin(), results_.end(), rank,
                                        [](const ShardResult& result, std::int32_t r) { return result.rank < r; });
    GRADCLIP_CHECK(place != results_.end() && place->rank == rank, "a copy's result did not arrive");
    return *place;
  }

  const Manifest& manifest_;
  const ParameterEntry& entry_;
  std::uint32_t parameter_;
  std::span<const ShardResult> results_;
  bool expert_;
  NormOrder order_;
};

/// norm of one tensor as torch computes it: accumulated in float32 (float64 for float64), rounded to the tensor's type.
double torch_norm(const TensorStatistics& statistics, DType dtype, NormOrder order) {
  double norm = statistics.norm(order);
  if (dtype == DType::float64 || !std::isfinite(norm)) return norm;
  if (!order.infinite() && std::pow(norm, order.p) > FLT_MAX) return std::numeric_limits<double>::infinity();
  const auto in_float = static_cast<float>(norm);
  return round_through(dtype, in_float);
}

void add_torch(RankTorchSum& sum, const TensorStatistics& statistics, DType dtype, NormOrder order) {
  const double norm = torch_norm(statistics, dtype, order);
  sum.dtype = sum.any ? promoted(sum.dtype, dtype) : dtype;  // by torch.stack
  sum.any = true;
  sum.nan = sum.nan || std::isnan(norm);
  sum.inf = sum.inf || std::isinf(norm);
  if (!std::isfinite(norm)) return;
  sum.largest = std::max(sum.largest, norm);
  if (!order.infinite()) sum.powers = add(sum.powers, power_of(norm, order), order.p);
}

/// What processes gathered, whichever ranks they serve; within a rank in the order of its process.
template <class T>
std::vector<T> ascending_by_rank(std::vector<T> sums) {
  std::stable_sort(sums.begin(), sums.end(), [](const T& a, const T& b) { return a.rank < b.rank; });
  return sums;
}

struct OwnedParameter {
  std::uint32_t parameter = 0;
  std::uint32_t none = 0;
  TensorStatistics statistics;
  TensorStatistics addends;
};

}  // namespace

DType promoted(DType a, DType b) noexcept {
  const auto [wider, other] = std::minmax(a, b);  // the enumeration falls in width
  return wider == DType::float16 && other == DType::bfloat16 ? DType::float32 : wider;
}

double round_through(DType dtype, double value) {
  return with_dtype(dtype, [&]<DType D>() -> double {
    return Element<D>::widen(Element<D>::round(static_cast<ComputeOf<D>>(value)));
  });
}

double widen_through(DType dtype, const std::byte* element) {
  return with_dtype(dtype, [&]<DType D>() -> double {
    typename Element<D>::Bits bits;
    std::memcpy(&bits, element, sizeof bits);
    return Element<D>::widen(bits);
  });
}

bool has_copies(const Manifest& manifest, const ParameterEntry& parameter, bool expert) {
  if (parameter.tied) return true;
  if (!parameter.mesh) {
    return !parameter.is_distinct(expert) && parameter.ranks.size() > 1;
  }
  const DeviceMesh& mesh = manifest.meshes[*parameter.mesh];
  const std::vector<Placement>& placements = parameter.layout();
  for (std::size_t d = 0; d < placements.size(); ++d) {
    if (placements[d].kind == Placement::Kind::replicate && mesh.shape()[d] > 1) return true;
  }
  return false;
}

bool is_counted_copy(const Manifest& manifest, const ParameterEntry& parameter, std::int32_t rank, bool expert) {
  if (!parameter.mesh) {
    return parameter.is_distinct(expert) || rank == parameter.ranks.front();
  }
  const Coordinate at = manifest.meshes[*parameter.mesh].coordinate(rank);
  const std::vector<Placement>& placements = parameter.layout();
  for (std::size_t d = 0; d < at.size(); ++d) {
    if (placements[d].kind == Placement::Kind::replicate && at[d] != 0) return false;
  }
  return true;
}

Absences::Absences(Run& run, const std::vector<bool>& expert, std::span<const NoneShard> mine) {
  const Manifest& manifest = run.dump.manifest();
  std::vector<NoneShard> told;
  for (const NoneShard& shard : mine) {
    const ParameterEntry& entry = manifest.parameters[shard.parameter];
    if (entry.has_partial() || has_copies(manifest, entry, expert[shard.parameter])) told.push_back(shard);
  }
  for (const NoneShard& shard : gather_values(run.comm, std::span<const NoneShard>(told))) {
    none_.emplace(shard.parameter, shard.rank);
  }
  for (const auto& [parameter, rank] : none_) {
    const ParameterEntry& entry = manifest.parameters[parameter];
    if (!is_counted_copy(manifest, entry, rank, expert[parameter])) continue;
    for (const std::int32_t copy : manifest.role(entry, rank, expert[parameter]).copies) {
      if (is_none(parameter, copy)) continue;
      substitutes_.push_back({static_cast<std::uint32_t>(parameter), rank, copy});
      break;
    }
  }
}

std::int32_t Absences::counted(std::size_t parameter, std::int32_t declared) const {
  const std::pair wanted{static_cast<std::uint32_t>(parameter), declared};
  const auto place = std::lower_bound(
      substitutes_.begin(), substitutes_.end(), wanted,
      [](const Substitute& one, const auto& key) { return std::pair(one.parameter, one.declared) < key; });
  const bool found = place != substitutes_.end() && std::pair(place->parameter, place->declared) == wanted;
  return found ? place->used : declared;
}

std::uint64_t global_position(std::span<const std::int64_t> shape, std::span<const std::int64_t> index) {
  std::uint64_t position = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    position = position * static_cast<std::uint64_t>(shape[d]) + static_cast<std::uint64_t>(index[d]);
  }
  return position;
}

std::vector<std::int64_t> index_at(std::span<const std::int64_t> shape, std::uint64_t position) {
  std::vector<std::int64_t> index(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    const auto extent = static_cast<std::uint64_t>(shape[d]);
    index[d] = static_cast<std::int64_t>(position % extent);
    position /= extent;
  }
  return index;
}

ShardSums sum_shards(Run& run, const ParameterFactors& factors, NormOrder order, bool by_object,
                     HistogramCollector* histograms) {
  const Manifest& manifest = run.dump.manifest();
  const std::size_t parameters = manifest.parameters.size();

  ShardSums sums;
  group_parameters(manifest, by_object, sums);
  std::vector<char> fingerprinted(parameters);
  for (std::size_t p = 0; p < parameters; ++p) {
    fingerprinted[p] = has_copies(manifest, manifest.parameters[p], factors.expert[p]);
  }
  const FactorsOf factors_of = [&](std::size_t parameter, std::int32_t) { return factors.of[parameter]; };

  std::map<std::pair<std::int32_t, std::uint32_t>, TensorStatistics> by_rank;
  std::map<std::int32_t, RankTorchSum> torch_by_rank;
  std::map<std::int32_t, TensorStatistics> counted_by_rank;
  const std::vector<bool> counted_entry = counted_entries(manifest);
  std::vector<StandIn> stand_ins;
  std::vector<OwnedParameter> owned;
  std::vector<ShardResult> tied;
  CoverageCheck coverage(manifest, factors.expert);
  for (const ParameterRange& range : exchange_ranges(run)) {
    std::vector<ShardResult> results =
        measure_shards(run, range, factors_of, {order}, fingerprinted, histograms, &coverage);

    for (const ShardResult& result : results) {
      const ParameterEntry& entry = manifest.parameters[result.parameter];
      if (result.none == 0) {
        const TensorStatistics seen =
            factors.zero_nonfinite ? with_nonfinite_zeroed(result.statistics) : result.statistics;
        add(by_rank[{result.rank, sums.group_of[result.parameter]}], seen, order);
        if (counted_entry[result.parameter] && !entry.has_partial() &&
            is_counted_copy(manifest, entry, result.rank, factors.expert[result.parameter])) {
          add(counted_by_rank[result.rank], seen, order);
        }
        RankTorchSum& torch = torch_by_rank[result.rank];
        torch.rank = result.rank;
        add_torch(torch, seen, entry.dtype, order);
      } else {
        sums.none_shards.push_back({result.parameter, result.rank});
        by_rank[{result.rank, sums.group_of[result.parameter]}];  // the rank takes part in the group all the same
      }
      if (entry.tied) tied.push_back(result);
    }
    const std::vector<ShardResult> mine = exchange_results(run, std::move(results));
    for (auto first = mine.begin(); first != mine.end();) {
      const auto last = std::find_if(first, mine.end(), [&](const auto& r) { return r.parameter != first->parameter; });
      OwnedParameter parameter{first->parameter, 0, {}, {}};
      for (auto it = first; it != last; ++it) parameter.none += static_cast<std::uint32_t>(it->none);
      ParameterFold(manifest, first->parameter, {first, last}, factors.expert[first->parameter], order)
          .fold(parameter.statistics, parameter.addends, sums.suspects, sums.absent, stand_ins);
      owned.push_back(parameter);
      first = last;
    }
  }

  sums.parameters.resize(parameters);
  sums.addends.resize(parameters);
  sums.none.resize(parameters);
  for (const OwnedParameter& one : gather_values(run.comm, std::span<const OwnedParameter>(owned))) {
    sums.parameters[one.parameter] = one.statistics;
    sums.addends[one.parameter] = one.addends;
    sums.none[one.parameter] = one.none;
  }
  std::vector<RankGroupSum> rank_sums;
  for (const auto& [key, statistics] : by_rank) rank_sums.push_back({key.first, key.second, statistics});
  sums.rank_sums = ascending_by_rank(gather_values(run.comm, std::span<const RankGroupSum>(rank_sums)));
  std::vector<RankStatistics> counted;
  for (const auto& [rank, statistics] : counted_by_rank) counted.push_back({rank, statistics});
  for (const RankStatistics& one : gather_values(run.comm, std::span<const RankStatistics>(counted))) {
    sums.counted[one.rank] = one.statistics;
  }
  stand_ins = gather_values(run.comm, std::span<const StandIn>(stand_ins));
  std::sort(stand_ins.begin(), stand_ins.end(), [](const StandIn& a, const StandIn& b) {
    return std::pair(a.parameter, a.rank) < std::pair(b.parameter, b.rank);
  });
  for (const StandIn& one : stand_ins) {
    if (!counted_entry[one.parameter]) continue;
    add(sums.counted[one.rank], factors.zero_nonfinite ? with_nonfinite_zeroed(one.statistics) : one.statistics, order);
  }
  sums.uncovered = coverage.uncovered(run.comm);
  std::vector<RankTorchSum> torch_sums;
  for (const auto& [rank, sum] : torch_by_rank) torch_sums.push_back(sum);
  sums.torch_sums = ascending_by_rank(gather_values(run.comm, std::span<const RankTorchSum>(torch_sums)));
  sums.suspects = gather_values(run.comm, std::span<const Suspect>(sums.suspects));
  std::sort(sums.suspects.begin(), sums.suspects.end());
  sums.absent = gather_values(run.comm, std::span<const AbsentCopy>(sums.absent));
  std::sort(sums.absent.begin(), sums.absent.end());
  sums.tied = gather_values(run.comm, std::span<const ShardResult>(tied));
  std::sort(sums.tied.begin(), sums.tied.end(), [](const ShardResult& a, const ShardResult& b) {
    return std::pair(a.parameter, a.rank) < std::pair(b.parameter, b.rank);
  });
  return sums;
}

std::vector<RankGroupSum> sum_reference_terms(
    Run& run, const ParameterFactors& factors, NormOrder order, const ShardSums& sums,
    const std::function<double(std::int32_t rank, std::uint32_t group)>& normalizer_of) {
  const FactorsOf factors_of = [&](std::size_t parameter, std::int32_t rank) {
    ScaleFactors one = factors.of[parameter];
    one.normalizer = normalizer_of(rank, sums.group_of[parameter]);
    // PyTorch's promotion: a 0-dim gradient divided by the 0-dim float64 largest magnitude is float64.
    const ParameterEntry& entry = run.dump.manifest().parameters[parameter];
    one.reference_in_float64 = entry.shape.empty() && entry.flat_ranges.empty();
    return one;
  };
  std::map<std::pair<std::int32_t, std::uint32_t>, TensorStatistics> by_rank;
  for (const ParameterRange& range : exchange_ranges(run)) {
    for (const ShardResult& result : measure_shards(run, range, factors_of, {order, TermArithmetic::reference}, {})) {
      if (result.none == 0) add(by_rank[{result.rank, sums.group_of[result.parameter]}], result.statistics, order);
    }
  }
  std::vector<RankGroupSum> mine;
  for (const auto& [key, statistics] : by_rank) mine.push_back({key.first, key.second, statistics});
  return ascending_by_rank(gather_values(run.comm, std::span<const RankGroupSum>(mine)));
}

}  // namespace gradclip
