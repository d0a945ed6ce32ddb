#include "gradclip/analysis/diverged_copies.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "gradclip/base/worker_pool.hpp"
#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {
namespace {

/// How copies of one side differ in one block. Trivially copyable: it travels.
struct CopyDifference {
  std::uint64_t block = 0;  ///< index into the round
  std::uint32_t side = 0;
  std::int32_t first_rank = -1;  ///< whose copy is the first that is different
  std::uint64_t first = kNowhere;
  double largest = 0.0;
  std::uint64_t nan = 0;     ///< a NaN met a number
  std::uint64_t absent = 0;  ///< elements that are None in a copy and not in another
  /// Squares of (sum of the copies - the other dump's value), of (their mean - it), of it. NaN where nothing is summed.
  double sum_apart = 0.0, mean_apart = 0.0, other = 0.0;

  [[nodiscard]] bool any() const noexcept { return first != kNowhere || absent != 0; }
};
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

class CopyComparison {
 public:
  CopyComparison(const BlockSide& side, const Block& block, std::uint32_t which, BlockAssembly& assembly)
      : side_(side), block_(block), assembly_(assembly) {
    found_.side = which;
  }

  /// @param other  the other dump's numbers of the block; `other_none` likewise
  CopyDifference compare(const std::vector<double>& other, bool other_none, std::vector<std::int32_t>& ranks) {
    for (std::uint32_t addend = 0; addend < side_.tensor.addends; ++addend) compare_addend(addend, ranks);
    if (found_.any()) add_up(other, other_none);
    return found_;
  }

 private:
  void compare_addend(std::uint32_t addend, std::vector<std::int32_t>& ranks) {
    BlockValues counted;
    assembly_.assemble_addend(side_, addend, std::nullopt, counted);
    const std::vector<double> numbers = widened(counted, side_.elements);
    std::vector<std::int32_t> holder(side_.elements, -1);  // the rank whose copy counts
    std::vector<const ComparedPiece*> pieces;
    for (const ComparedPiece& piece : side_.pieces) {
      if (piece.header.addend == addend) pieces.push_back(&piece);
    }
    std::sort(pieces.begin(), pieces.end(), [](const ComparedPiece* x, const ComparedPiece* y) {
      return std::pair(x->header.copy, x->header.rank) < std::pair(y->header.copy, y->header.rank);
    });
    for (const ComparedPiece* piece : pieces) {
      if (piece->header.none != 0) continue;
      for_each_element(*piece, [&](std::uint64_t at, std::uint64_t) {
        if (holder[at] < 0) holder[at] = piece->header.rank;
      });
    }
    for (const ComparedPiece* piece : pieces) compare_piece(*piece, numbers, holder, ranks);
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
        ++found_.nan;
      } else {
        found_.largest = std::max(found_.largest, std::abs(x - y));
      }
      if (holder[at] == last_holder) return;
      last_holder = holder[at];
      ranks.push_back(last_holder);
      ranks.push_back(piece.header.rank);
    });
  }

  void add_up(const std::vector<double>& other, bool other_none) {
    const bool none = std::any_of(side_.pieces.begin(), side_.pieces.end(),
                                  [](const ComparedPiece& piece) { return piece.header.none != 0; });
    if (!side_.tensor.steps.empty() || none || other_none) {
      found_.sum_apart = found_.mean_apart = std::nan("");
      return;
    }
    std::vector<double> sum(side_.elements, 0.0);
    BlockValues one;
    for (std::uint32_t copy = 0; copy < side_.tensor.copies; ++copy) {
      assembly_.assemble_addend(side_, 0, copy, one);
      const std::vector<double> numbers = widened(one, side_.elements);
      for (std::uint64_t e = 0; e < side_.elements; ++e) sum[e] += numbers[e];
    }
    for (std::uint64_t e = 0; e < side_.elements; ++e) {
      const double of_sum = sum[e] - other[e];
      const double of_mean = sum[e] / side_.tensor.copies - other[e];
      found_.sum_apart += of_sum * of_sum;
      found_.mean_apart += of_mean * of_mean;
      found_.other += other[e] * other[e];
    }
  }

  const BlockSide& side_;
  const Block& block_;
  BlockAssembly& assembly_;
  CopyDifference found_;
};

/// A parameter's copies in one dump, all blocks together.
struct Merged {
  CopyDifference found;
  std::set<std::int32_t> ranks;
};

void merge(Merged& to, const CopyDifference& next) {
  CopyDifference& found = to.found;
  if (next.first < found.first) {
    found.first = next.first;
    found.first_rank = next.first_rank;
  }
  found.largest = std::max(found.largest, next.largest);
  found.nan += next.nan;
  found.absent += next.absent;
  found.sum_apart += next.sum_apart;
  found.mean_apart += next.mean_apart;
  found.other += next.other;
}

Finding finding_of(const ParameterDifference& parameter, std::uint32_t side, const Merged& merged) {
  const CopyDifference& found = merged.found;
  const ComparedTensor& tensor = side == 0 ? *parameter.pair.a : *parameter.pair.b;
  const char* here = side == 0 ? "A" : "B";
  const char* there = side == 0 ? "B" : "A";
  Finding finding{.kind = "replicas-differ",
                  .parameter = parameter.pair.name,
                  .ranks = {merged.ranks.begin(), merged.ranks.end()},
                  .index = {},
                  .value = {},
                  .message = fmt::format("in {}", here)};
  if (found.first != kNowhere) {
    finding.value = found.nan != 0 ? std::nan("") : found.largest;
    finding.index = index_at(parameter.pair.shape, found.first);
    finding.message += fmt::format(" copies that should be equal differ by up to {:.6g}, first on rank {}",
                                   *finding.value, found.first_rank);
  }
  if (found.absent != 0) {
    finding.message +=
        fmt::format("{} the gradient is None in some copies and not in others", found.first != kNowhere ? ";" : "");
  }
  // What n additions round, and what storing each copy and the other dump's value rounded.
  const double limit = 2.0 * tensor.copies * epsilon_of(parameter.rule.narrower) * std::sqrt(found.other);
  if (found.other > 0.0 && found.first != kNowhere) {
    if (std::sqrt(found.sum_apart) <= limit) {
      finding.message += fmt::format(
          "; the sum of the {} copies is what {} has: they look like Partial addends that were "
          "never reduced",
          tensor.copies, there);
    } else if (std::sqrt(found.mean_apart) <= limit) {
      finding.message += fmt::format(
          "; the mean of the {} copies is what {} has: they look like gradients that were never "
          "averaged",
          tensor.copies, there);
    }
  }
  return finding;
}

}  // namespace

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
  std::map<std::pair<std::size_t, std::uint32_t>, Merged> merged;
  exchange.for_each_round(compared, [&](std::span<const Block> round) {
    const std::vector<BlockPieces> pieces = exchange.collect(round);
    std::vector<std::size_t> mine;
    for (std::size_t i = 0; i < round.size(); ++i) {
      if (round[i].owner == run.comm.process()) mine.push_back(i);
    }
    std::vector<BlockResult> results(round.size());
    std::vector<std::array<CopyDifference, 2>> copies(round.size());
    std::vector<std::array<std::vector<std::int32_t>, 2>> ranks(round.size());
    parallel_for(mine.size(), run.threads, [&](std::size_t index, std::size_t worker) {
      const std::size_t i = mine[index];
      const ParameterDifference& parameter = parameters[round[i].pair];
      BlockWorkspace& workspace = workspaces[worker];
      const std::array<BlockSide, 2> sides = sides_of(run, parameter, round[i], pieces[i]);
      workspace.assembly.assemble(sides[0], std::nullopt, workspace.a);
      workspace.assembly.assemble(sides[1], std::nullopt, workspace.b);
      results[i] = compare_values(workspace, round[i], parameter.rule, max_elements);
      for (std::uint32_t side = 0; side < 2; ++side) {
        if (sides[side].tensor.copies == 1) continue;
        const BlockValues& other = side == 0 ? workspace.b : workspace.a;
        const bool other_none = std::find(other.none.begin(), other.none.end(), 1) != other.none.end();
        copies[i][side] = CopyComparison(sides[side], round[i], side, workspace.assembly)
                              .compare(widened(other, round[i].elements), other_none, ranks[i][side]);
        copies[i][side].block = i;
      }
    });
    collect_results(run, round, results, max_elements, parameters);

    std::vector<CopyDifference> my_copies;
    std::vector<DisagreeingRank> my_ranks;
    for (const std::size_t i : mine) {
      for (std::uint32_t side = 0; side < 2; ++side) {
        const CopyDifference& found = copies[i][side];
        if (found.any()) my_copies.push_back(found);
        const std::set<std::int32_t> distinct(ranks[i][side].begin(), ranks[i][side].end());
        for (const std::int32_t rank : distinct) my_ranks.push_back({round[i].pair, side, rank});
      }
    }
    std::vector<CopyDifference> all = gather_values(run.comm, std::span<const CopyDifference>(my_copies));
    std::sort(all.begin(), all.end(), [](const CopyDifference& x, const CopyDifference& y) {
      return std::pair(x.block, x.side) < std::pair(y.block, y.side);
    });
    for (const CopyDifference& found : all) merge(merged[{round[found.block].pair, found.side}], found);
    for (const DisagreeingRank& each : gather_values(run.comm, std::span<const DisagreeingRank>(my_ranks))) {
      merged[{each.pair, each.side}].ranks.insert(each.rank);
    }
  });
  for (const auto& [key, each] : merged) {
    if (each.found.any()) findings.push_back(finding_of(parameters[key.first], key.second, each));
  }
  return findings;
}

}  // namespace gradclip
