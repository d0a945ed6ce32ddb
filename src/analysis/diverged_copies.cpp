#include "gradclip/analysis/diverged_copies.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "gradclip/analysis/difference.hpp"
#include "gradclip/base/worker_pool.hpp"
#include "gradclip/norm/findings.hpp"
#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {
namespace {

struct DisagreeingRank {
  std::uint64_t pair = 0;
  std::uint32_t side = 0;
  std::int32_t rank = 0;
};

std::vector<double> widened(const BlockValues& values, std::uint64_t elements) {
  std::vector<double> numbers(elements);
  widen_elements(values.bytes.data(), values.dtype, elements, numbers.data());
  return numbers;
}

/// Calls use(element of the block, element of the piece).
template <class Use>
void for_each_element(const ComparedPiece& piece, const Use& use) {
  std::uint64_t local = 0;
  for (const StridedRun& run : piece.runs) {
    for (std::uint32_t repeat = 0; repeat < run.repeats; ++repeat) {
      const std::uint64_t at = std::uint64_t{run.offset} + std::uint64_t{repeat} * run.stride;
      for (std::uint32_t i = 0; i < run.count; ++i) use(at + i, local++);
    }
  }
}

class BlockCopies {
 public:
  BlockCopies(const BlockSide& side, const Block& block, std::uint32_t which, BlockAssembly& assembly)
      : side_(side), block_(block), assembly_(assembly) {
    found_.side = which;
  }

  /// @param other  the other dump's block; null: there is none
  CopyDifference compare(const BlockValues* other, std::vector<std::int32_t>& ranks) {
    for (std::uint32_t addend = 0; addend < side_.tensor.addends; ++addend) compare_addend(addend, ranks);
    if (found_.any() && other != nullptr) add_up(*other);
    return found_;
  }

 private:
  void compare_addend(std::uint32_t addend, std::vector<std::int32_t>& ranks) {
    BlockValues counted;
    assembly_.assemble_addend(side_, addend, std::nullopt, counted);
    const std::vector<double> numbers = widened(counted, side_.elements);
    std::vector<std::int32_t> holder(side_.elements, -1);  // the rank whose copy counts
    const std::span<const ComparedPiece> pieces = pieces_of(side_.pieces, addend, std::nullopt);
    for (const ComparedPiece& piece : pieces) {
      if (piece.header.none != 0) continue;
      for_each_element(piece, [&](std::uint64_t at, std::uint64_t) {
        if (holder[at] < 0) holder[at] = piece.header.rank;
      });
    }
    for (const ComparedPiece& piece : pieces) compare_piece(piece, numbers, holder, ranks);
  }

  void compare_piece(const ComparedPiece& piece, const std::vector<double>& counted,
                     const std::vector<std::int32_t>& holder, std::vector<std::int32_t>& ranks) {
    BlockValues own;
    own.dtype = is_float8(side_.tensor.dtype) ? DType::float32 : side_.tensor.dtype;
    std::vector<double> numbers;
    if (piece.header.none == 0) {
      own.bytes.resize(piece.header.elements * size_of(own.dtype));
      copy_values(assembly_.stored(side_, piece), side_.tensor.dtype, piece.header.scale_inv, piece.header.elements,
                  own.bytes.data());
      numbers = widened(own, piece.header.elements);
    }
    std::int32_t last_holder = -1;
    for_each_element(piece, [&](std::uint64_t at, std::uint64_t local) {
      if (holder[at] < 0) return;  // None in all copies
      if (piece.header.none != 0) {
        ++found_.absent;
        if (ranks.empty() || ranks.back() != piece.header.rank) ranks.push_back(piece.header.rank);
        return;
      }
      const double x = counted[at], y = numbers[local];
      if (x == y || (std::isnan(x) && std::isnan(y))) return;
      const std::uint64_t position = block_.begin + at;
      if (position < found_.first || (position == found_.first && piece.header.rank < found_.first_rank)) {
        found_.first = position;
        found_.first_rank = piece.header.rank;
      }
      if (std::isnan(x) || std::isnan(y)) {
        if (found_.nan_rank < 0) {
          found_.nan_rank = std::isnan(y) ? piece.header.rank : holder[at];
          found_.number_rank = std::isnan(y) ? holder[at] : piece.header.rank;
        }
      } else {
        found_.largest = std::max(found_.largest, std::abs(x - y));
      }
      if (holder[at] == last_holder) return;
      last_holder = holder[at];
      ranks.push_back(last_holder);
      ranks.push_back(piece.header.rank);
    });
  }

  void add_up(const BlockValues& there) {
    const bool none = std::any_of(side_.pieces.begin(), side_.pieces.end(),
                                  [](const ComparedPiece& piece) { return piece.header.none != 0; }) ||
                      std::find(there.none.begin(), there.none.end(), 1) != there.none.end();
    if (!side_.tensor.steps.empty() || none) {
      found_.sum_apart = found_.mean_apart = std::nan("");
      return;
    }
    const std::vector<double> other = widened(there, side_.elements);
    BlockValues one;
    assembly_.assemble_addend(side_, 0, 0, one);
    const std::vector<double> counted = widened(one, side_.elements);
    std::vector<double> sum = counted;
    std::vector<char> apart(side_.elements, 0);  // what all copies agree on says nothing
    for (std::uint32_t copy = 1; copy < side_.tensor.copies; ++copy) {
      assembly_.assemble_addend(side_, 0, copy, one);
      const std::vector<double> numbers = widened(one, side_.elements);
      for (std::uint64_t e = 0; e < side_.elements; ++e) {
        sum[e] += numbers[e];
        if (numbers[e] != counted[e]) apart[e] = 1;
      }
    }
    for (std::uint64_t e = 0; e < side_.elements; ++e) {
      if (apart[e] == 0) continue;
      const double of_sum = sum[e] - other[e];
      const double of_mean = sum[e] / side_.tensor.copies - other[e];
      const double of_counted = counted[e] - other[e];
      found_.sum_apart += of_sum * of_sum;
      found_.mean_apart += of_mean * of_mean;
      found_.counted_apart += of_counted * of_counted;
      found_.other += other[e] * other[e];
    }
  }

  const BlockSide& side_;
  const Block& block_;
  BlockAssembly& assembly_;
  CopyDifference found_;
};

void merge(CopyDifference& found, const CopyDifference& next) {
  if (next.first < found.first) {
    found.first = next.first;
    found.first_rank = next.first_rank;
  }
  found.largest = std::max(found.largest, next.largest);
  if (found.nan_rank < 0) {
    found.nan_rank = next.nan_rank;
    found.number_rank = next.number_rank;
  }
  found.absent += next.absent;
  found.sum_apart += next.sum_apart;
  found.mean_apart += next.mean_apart;
  found.counted_apart += next.counted_apart;
  found.other += next.other;
}

/// @param two_dumps  so that the message has to say which
Finding finding_of(const ComparedPair& pair, std::uint32_t side, bool two_dumps, const CopyDifference& found,
                   const std::set<std::int32_t>& ranks) {
  const ComparedTensor& tensor = side == 0 ? *pair.a : *pair.b;
  const char* there = side == 0 ? "B" : "A";
  Finding finding{.kind = "replicas-differ",
                  .parameter = pair.name,
                  .ranks = {ranks.begin(), ranks.end()},
                  .index = {},
                  .value = {},
                  .message = two_dumps ? (side == 0 ? "in A " : "in B ") : ""};
  if (found.first != kNowhere) {
    finding.value = found.nan_rank >= 0 ? std::nan("") : found.largest;
    finding.index = index_at(pair.shape, found.first);
    finding.message += copies_differ(found.largest, found.nan_rank, found.number_rank, found.first_rank);
  }
  if (found.absent != 0) {
    finding.message +=
        fmt::format("{}the gradient is None in some copies and not in others", found.first != kNowhere ? "; " : "");
  }
  if (!two_dumps || found.other <= 0.0 || found.first == kNowhere) return finding;
  // What n additions round, and what storing each copy and the other dump's value rounded.
  const DType narrower = narrower_of(pair.a->dtype, pair.b->dtype);
  const double limit = std::min(kMostUnexplained, 2.0 * tensor.copies * epsilon_of(narrower)) * std::sqrt(found.other);
  // Where the copy that counts is as near by itself, some other copy went astray, and nothing was left out.
  const auto explains = [&](double apart) { return std::sqrt(apart) <= limit && apart < 0.25 * found.counted_apart; };
  if (explains(found.sum_apart)) {
    finding.message += fmt::format(
        "; the sum of the {} copies is what {} has: they look like Partial addends that were "
        "never reduced",
        tensor.copies, there);
  } else if (explains(found.mean_apart)) {
    finding.message += fmt::format(
        "; the mean of the {} copies is what {} has: they look like gradients that were never "
        "averaged",
        tensor.copies, there);
  }
  return finding;
}

}  // namespace

void CopyComparison::begin(std::size_t blocks) {
  of_block_.assign(blocks, {});
  ranks_of_block_.assign(blocks, {});
}

void CopyComparison::compare(std::size_t index, const Block& block, std::uint32_t side, const BlockSide& values,
                             const BlockValues* other, BlockAssembly& assembly) {
  if (values.tensor.copies == 1) return;
  of_block_[index][side] = BlockCopies(values, block, side, assembly).compare(other, ranks_of_block_[index][side]);
  of_block_[index][side].block = index;
}

void CopyComparison::collect(std::span<const Block> round) {
  std::vector<CopyDifference> mine;
  std::vector<DisagreeingRank> my_ranks;
  for (std::size_t i = 0; i < of_block_.size(); ++i) {
    for (std::uint32_t side = 0; side < 2; ++side) {
      if (of_block_[i][side].any()) mine.push_back(of_block_[i][side]);
      const std::vector<std::int32_t>& ranks = ranks_of_block_[i][side];
      const std::set<std::int32_t> distinct(ranks.begin(), ranks.end());
      for (const std::int32_t rank : distinct) my_ranks.push_back({round[i].pair, side, rank});
    }
  }
  std::vector<CopyDifference> all = gather_values(comm_, std::span<const CopyDifference>(mine));
  std::sort(all.begin(), all.end(), [](const CopyDifference& x, const CopyDifference& y) {
    return std::pair(x.block, x.side) < std::pair(y.block, y.side);
  });
  for (const CopyDifference& found : all) merge(merged_[{round[found.block].pair, found.side}].found, found);
  for (const DisagreeingRank& each : gather_values(comm_, std::span<const DisagreeingRank>(my_ranks))) {
    merged_[{each.pair, each.side}].ranks.insert(each.rank);
  }
}

std::vector<CopyComparison::PairFinding> CopyComparison::findings(const std::vector<ComparedPair>& pairs,
                                                                  bool two_dumps) const {
  std::vector<PairFinding> findings;
  for (const auto& [key, each] : merged_) {
    if (!each.found.any()) continue;
    findings.push_back({key.first, finding_of(pairs[key.first], key.second, two_dumps, each.found, each.ranks)});
  }
  return findings;
}

std::vector<Finding> compare_copies(DiffRun& run, const std::vector<ComparedPair>& pairs,
                                    const std::set<std::size_t>& suspects, std::size_t max_elements,
                                    std::vector<ParameterDifference>& parameters) {
  std::vector<Finding> findings;
  if (suspects.empty()) return findings;
  const std::vector<std::size_t> compared(suspects.begin(), suspects.end());
  for (const std::size_t p : compared) {
    parameters[p].found = {};
    parameters[p].worst.clear();
  }
  BlockExchange exchange(run, pairs, /*all_copies=*/true);
  std::vector<BlockWorkspace> workspaces(run.threads);
  CopyComparison copies(run.comm);
  exchange.for_each_round(compared, [&](std::span<const Block> round) {
    const std::vector<BlockPieces> pieces = exchange.collect(round);
    std::vector<std::size_t> mine;
    for (std::size_t i = 0; i < round.size(); ++i) {
      if (round[i].owner == run.comm.process()) mine.push_back(i);
    }
    std::vector<BlockResult> results(round.size());
    copies.begin(round.size());
    parallel_for(mine.size(), run.threads, [&](std::size_t index, std::size_t worker) {
      const std::size_t i = mine[index];
      const ParameterDifference& parameter = parameters[round[i].pair];
      BlockWorkspace& workspace = workspaces[worker];
      const std::array<BlockSide, 2> sides = sides_of(run, parameter, round[i], pieces[i]);
      workspace.assembly.assemble(sides[0], std::nullopt, workspace.a);
      workspace.assembly.assemble(sides[1], std::nullopt, workspace.b);
      results[i] = compare_values(workspace, round[i], parameter.rule, max_elements);
      copies.compare(i, round[i], 0, sides[0], &workspace.b, workspace.assembly);
      copies.compare(i, round[i], 1, sides[1], &workspace.a, workspace.assembly);
    });
    collect_results(run, round, results, max_elements, parameters);
    copies.collect(round);
  });
  for (CopyComparison::PairFinding& each : copies.findings(pairs, /*two_dumps=*/true)) {
    findings.push_back(std::move(each.finding));
  }
  return findings;
}

}  // namespace gradclip
