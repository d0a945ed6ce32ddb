#include "gradclip/norm/result_exchange.hpp"

#include <algorithm>
#include <tuple>

namespace gradclip {
namespace {

constexpr std::size_t kLeastBytes = std::size_t{64} << 20;
constexpr std::size_t kHeldTwice = 2 * sizeof(ShardResult);  // sent and received

}  // namespace

std::size_t parameters_per_exchange(const Run& run) {
  const std::size_t bytes = std::max(run.stream.options().memory_budget / 4, kLeastBytes);
  const std::size_t ranks = std::max<std::size_t>(1, run.plan.most_ranks());
  return std::max<std::size_t>(1, bytes / kHeldTwice / ranks);
}

std::vector<ShardResult> exchange_results(Run& run, std::vector<ShardResult> results) {
  const auto by_parameter = [](const ShardResult& a, const ShardResult& b) {
    return std::pair(a.parameter, a.rank) < std::pair(b.parameter, b.rank);
  };
  const auto processes = static_cast<std::uint32_t>(run.comm.size());
  if (processes > 1) {
    std::vector<std::size_t> counts(processes, 0);
    for (const ShardResult& result : results) ++counts[result.parameter % processes];
    std::sort(results.begin(), results.end(), [processes](const ShardResult& a, const ShardResult& b) {
      return std::tuple(a.parameter % processes, a.parameter, a.rank) <
             std::tuple(b.parameter % processes, b.parameter, b.rank);
    });
    results = exchange_values(run.comm, std::move(results), counts);
  }
  std::sort(results.begin(), results.end(), by_parameter);
  return results;
}

}  // namespace gradclip
