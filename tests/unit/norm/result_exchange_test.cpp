#include "gradclip/norm/result_exchange.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace gradclip {
namespace {

constexpr std::size_t kResult = 2 * sizeof(ShardResult);  // sent and received

/// Four stages of 8 ranks, whose parameters come one after another; then one plain tensor on ranks 0 and 1.
Manifest staged(std::size_t parameters_of_stage) {
  Manifest manifest;
  manifest.world_size = 32;
  for (std::int32_t stage = 0; stage < 4; ++stage) {
    std::vector<std::int32_t> members(8);
    std::iota(members.begin(), members.end(), stage * 8);
    manifest.meshes.emplace_back("stage", std::vector<std::string>{"dp"}, std::vector<std::int64_t>{8}, members);
    for (std::size_t i = 0; i < parameters_of_stage; ++i) {
      ParameterEntry parameter;
      parameter.shape = {64};
      parameter.elements = 64;
      parameter.mesh = manifest.meshes.size() - 1;
      parameter.placements = {Placement{.kind = Placement::Kind::shard}};
      manifest.parameters.push_back(parameter);
    }
  }
  ParameterEntry plain;
  plain.ranks = {0, 1};
  manifest.parameters.push_back(plain);
  return manifest;
}

std::vector<std::pair<std::size_t, std::size_t>> ranges(const Manifest& manifest, int processes, std::size_t results) {
  std::vector<std::pair<std::size_t, std::size_t>> found;
  for (const ParameterRange& range : exchange_ranges(manifest, plan_work(manifest, processes), results * kResult)) {
    found.emplace_back(range.begin, range.end);
  }
  return found;
}

using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;

TEST(ExchangeRanges, CountRanksThatHoldAParameter) {
  const Manifest manifest = staged(3);  // 12 parameters of 8 shards, 1 of 2
  EXPECT_EQ(ranges(manifest, 1, 98), (Ranges{{0, 13}}));
  EXPECT_EQ(ranges(manifest, 1, 97), (Ranges{{0, 12}, {12, 13}}));
  EXPECT_EQ(ranges(manifest, 1, 16), (Ranges{{0, 2}, {2, 4}, {4, 6}, {6, 8}, {8, 10}, {10, 12}, {12, 13}}));
}

TEST(ExchangeRanges, CountThoseOfTheProcessWithMost) {
  // Two of 16 ranks each: a stage lies on one of them. Eight of four: 4 ranks of a stage on each of two.
  EXPECT_EQ(ranges(staged(3), 2, 98), (Ranges{{0, 13}}));
  EXPECT_EQ(ranges(staged(3), 8, 50), (Ranges{{0, 13}}));
  EXPECT_EQ(ranges(staged(3), 8, 24), (Ranges{{0, 6}, {6, 12}, {12, 13}}));
}

TEST(ExchangeRanges, HaveOneParameterAtLeastAndAreNeverNone) {
  EXPECT_EQ(ranges(staged(1), 1, 1), (Ranges{{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}}));
  Manifest empty;
  empty.world_size = 2;
  EXPECT_EQ(ranges(empty, 1, 1), (Ranges{{0, 0}}));
}

}  // namespace
}  // namespace gradclip
