#pragma once
// Pairs of tensors compared block by block by all processes, and the results brought together in order.

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "gradclip/analysis/block_values.hpp"
#include "gradclip/analysis/diff.hpp"

namespace gradclip {

/// What one block's comparison found.
struct BlockResult {
  std::vector<Difference> chunks;
  std::vector<WorstElement> worst;
};

/// Both sides of a block in memory, and what puts them together; one for each worker.
struct BlockWorkspace {
  BlockAssembly assembly;
  BlockValues a, b;
};

/// A block's two sides. @pre parameter.compared()
[[nodiscard]] std::array<BlockSide, 2> sides_of(const DiffRun& run, const ParameterDifference& parameter,
                                                const Block& block, const BlockPieces& pieces);

/// Compares what the workspace holds, chunk by chunk.
[[nodiscard]] BlockResult compare_values(const BlockWorkspace& workspace, const Block& block, const ElementRule& rule,
                                         std::size_t max_elements);

/// Adds all processes' results of a round to the parameters', in the order of blocks. Collective.
/// @param results  by block of the round; empty for blocks of other processes
void collect_results(DiffRun& run, std::span<const Block> round, std::span<const BlockResult> results,
                     std::size_t max_elements, std::vector<ParameterDifference>& parameters);

/// Compares these parameters, counted copies with counted copies. Collective.
/// @return  the parameters that were not compared to the end because copies of them are not the same, byte for byte:
///          on every process the same ones
[[nodiscard]] std::set<std::size_t> compare_blocks(DiffRun& run, const std::vector<ComparedPair>& pairs,
                                                   std::size_t max_elements,
                                                   std::vector<ParameterDifference>& parameters);

}  // namespace gradclip
