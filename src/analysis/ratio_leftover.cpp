#include "gradclip/analysis/ratio_leftover.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "gradclip/analysis/block_comparison.hpp"
#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/worker_pool.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kPiece = 1024;  // elements that are widened at a time

/// Trivially copyable: it travels.
struct TravellingLeftover {
  std::uint64_t pair = 0;
  RatioLeftover leftover;
};

/// The same whichever comes first.
void add(RatioLeftover& to, const RatioLeftover& more) {
  to.elements += more.elements;
  if (more.furthest > to.furthest || (more.furthest == to.furthest && more.at < to.at)) {
    to.furthest = more.furthest;
    to.at = more.at;
    to.a = more.a;
    to.b = more.b;
  }
}

bool may_have_leftovers(const ParameterDifference& parameter) {
  return parameter.ratio->of_sums || parameter.found.ratio_unknown != 0;
}

}  // namespace

RatioLeftover elements_left_over(const ElementView& a, const ElementView& b, std::size_t count, std::uint64_t position,
                                 double ratio, double epsilon) {
  const double tiny = epsilon * (std::abs(ratio) * a.smallest_normal + b.smallest_normal);
  RatioLeftover result;
  double of_a[kPiece], of_b[kPiece];
  for (std::size_t first = 0; first < count; first += kPiece) {
    const std::size_t piece = std::min(kPiece, count - first);
    widen_elements(a.data + first * size_of(a.dtype), a.dtype, piece, of_a);
    widen_elements(b.data + first * size_of(b.dtype), b.dtype, piece, of_b);
    for (std::size_t i = 0; i < piece; ++i) {
      if (!std::isfinite(of_a[i]) || !std::isfinite(of_b[i])) continue;
      if (a.none != nullptr && a.none[first + i] != 0) continue;  // and so it is in B: None and a number have no ratio
      const double expected = ratio * of_a[i];
      const double apart = std::abs(of_b[i] - expected);
      if (apart <= 4.0 * epsilon * std::abs(expected) + tiny) continue;
      add(result, {1, position + first + i, apart, of_a[i], of_b[i]});
    }
  }
  return result;
}

void measure_leftovers(DiffRun& run, const std::vector<ComparedPair>& pairs, const std::set<std::size_t>& suspects,
                       const std::vector<RatioGroup>& groups, std::vector<ParameterDifference>& parameters) {
  std::vector<double> ratios(parameters.size(), 0.0);
  std::vector<std::size_t> measured[2];  // the second ones have copies that differ
  for (const RatioGroup& group : groups) {
    for (const std::size_t p : group.parameters) {
      if (!may_have_leftovers(parameters[p])) continue;
      ratios[p] = group.number;
      measured[suspects.count(p)].push_back(p);
    }
  }
  std::vector<BlockWorkspace> workspaces(run.threads);
  std::vector<TravellingLeftover> mine;
  for (const bool all_copies : {false, true}) {
    std::vector<std::size_t>& these = measured[all_copies ? 1 : 0];
    if (these.empty()) continue;
    std::sort(these.begin(), these.end());
    BlockExchange exchange(run, pairs, all_copies);
    exchange.for_each_round(these, [&](std::span<const Block> round) {
      const std::vector<BlockPieces> pieces = exchange.collect(round);
      std::vector<RatioLeftover> of_round(round.size());
      parallel_for(round.size(), run.threads, [&](std::size_t i, std::size_t worker) {
        const Block& block = round[i];
        if (block.owner != run.comm.process()) return;
        const ParameterDifference& parameter = parameters[block.pair];
        BlockWorkspace& workspace = workspaces[worker];
        const std::array<BlockSide, 2> sides = sides_of(run, parameter, block, pieces[i]);
        const std::optional<std::uint32_t> copy = all_copies ? std::nullopt : std::optional<std::uint32_t>(0);
        workspace.assembly.assemble(sides[0], copy, workspace.a);
        workspace.assembly.assemble(sides[1], copy, workspace.b);
        of_round[i] = elements_left_over(workspace.a.view(0), workspace.b.view(0), block.elements, block.begin,
                                         ratios[block.pair], epsilon_of(parameter.rule.narrower));
      });
      for (std::size_t i = 0; i < round.size(); ++i) {
        if (of_round[i].elements != 0) mine.push_back({round[i].pair, of_round[i]});
      }
    });
  }
  for (const TravellingLeftover& each : gather_values(run.comm, std::span<const TravellingLeftover>(mine))) {
    add(parameters[each.pair].leftover, each.leftover);
  }
}

}  // namespace gradclip
