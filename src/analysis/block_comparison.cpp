#include "gradclip/analysis/block_comparison.hpp"

#include <algorithm>

#include "gradclip/base/worker_pool.hpp"

namespace gradclip {
namespace {

/// A chunk's result as it travels. Trivially copyable; so is the next.
struct TravellingDifference {
  std::uint64_t block = 0;  ///< index into the round
  std::uint64_t chunk = 0;
  Difference difference;
};
struct TravellingElement {
  std::uint64_t pair = 0;
  WorstElement element;
};

}  // namespace

std::array<BlockSide, 2> sides_of(const DiffRun& run, const ParameterDifference& parameter, const Block& block,
                                  const BlockPieces& pieces) {
  return {BlockSide{*run.dumps[0], *parameter.pair.a, pieces[0], block.elements, run.progress},
          BlockSide{*run.dumps[1], *parameter.pair.b, pieces[1], block.elements, run.progress}};
}

BlockResult compare_values(const BlockWorkspace& workspace, const Block& block, const ElementRule& rule,
                           std::size_t max_elements) {
  BlockResult result;
  for (std::uint64_t first = 0; first < block.elements; first += block.summed_at_once) {
    const auto count = static_cast<std::size_t>(std::min(block.summed_at_once, block.elements - first));
    result.chunks.push_back(compare_elements(workspace.a.view(first), workspace.b.view(first), count,
                                             block.begin + first, rule, max_elements, result.worst));
  }
  return result;
}

void collect_results(DiffRun& run, std::span<const Block> round, std::span<const BlockResult> results,
                     std::size_t max_elements, std::vector<ParameterDifference>& parameters) {
  std::vector<TravellingDifference> mine;
  std::vector<TravellingElement> my_worst;
  for (std::size_t i = 0; i < results.size(); ++i) {
    for (std::size_t c = 0; c < results[i].chunks.size(); ++c) mine.push_back({i, c, results[i].chunks[c]});
    for (const WorstElement& element : results[i].worst) my_worst.push_back({round[i].pair, element});
  }
  std::vector<TravellingDifference> all = gather_values(run.comm, std::span<const TravellingDifference>(mine));
  std::sort(all.begin(), all.end(), [](const TravellingDifference& x, const TravellingDifference& y) {
    return std::pair(x.block, x.chunk) < std::pair(y.block, y.chunk);
  });
  for (const TravellingDifference& each : all) append(parameters[round[each.block].pair].found, each.difference);
  if (max_elements == 0) return;
  for (const TravellingElement& each : gather_values(run.comm, std::span<const TravellingElement>(my_worst))) {
    keep_worst(parameters[each.pair].worst, each.element, max_elements);
  }
}

std::set<std::size_t> compare_blocks(DiffRun& run, const std::vector<ComparedPair>& pairs, std::size_t max_elements,
                                     std::vector<ParameterDifference>& parameters) {
  std::vector<std::size_t> compared;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (parameters[p].compared()) compared.push_back(p);
  }
  BlockExchange exchange(run, pairs, /*all_copies=*/false);
  std::vector<BlockWorkspace> workspaces(run.threads);
  std::vector<std::uint64_t> my_suspects;
  exchange.for_each_round(compared, [&](std::span<const Block> round) {
    const std::vector<BlockPieces> pieces = exchange.collect(round);
    std::vector<std::size_t> mine;
    for (std::size_t i = 0; i < round.size(); ++i) {
      if (round[i].owner != run.comm.process()) continue;
      if (copies_agree(pieces[i][0]) && copies_agree(pieces[i][1])) {
        mine.push_back(i);
      } else {
        my_suspects.push_back(round[i].pair);
      }
    }
    std::vector<BlockResult> results(round.size());
    parallel_for(mine.size(), run.threads, [&](std::size_t index, std::size_t worker) {
      const std::size_t i = mine[index];
      const ParameterDifference& parameter = parameters[round[i].pair];
      BlockWorkspace& workspace = workspaces[worker];
      const std::array<BlockSide, 2> sides = sides_of(run, parameter, round[i], pieces[i]);
      workspace.assembly.assemble(sides[0], 0, workspace.a);
      workspace.assembly.assemble(sides[1], 0, workspace.b);
      results[i] = compare_values(workspace, round[i], parameter.rule, max_elements);
    });
    collect_results(run, round, results, max_elements, parameters);
  });
  const std::vector<std::uint64_t> suspects = gather_values(run.comm, std::span<const std::uint64_t>(my_suspects));
  return {suspects.begin(), suspects.end()};
}

}  // namespace gradclip
