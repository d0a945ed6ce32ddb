#include "gradclip/stream/work_plan.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace gradclip {
namespace {

/// `ranks` recorded ranks in pairs of stages; each parameter Shard(0) over one stage.
Manifest staged(std::int32_t ranks, std::vector<std::uint64_t> elements_of_stage) {
  Manifest manifest;
  manifest.world_size = ranks;
  const auto stages = static_cast<std::int32_t>(elements_of_stage.size());
  const std::int32_t per_stage = ranks / stages;
  for (std::int32_t stage = 0; stage < stages; ++stage) {
    std::vector<std::int32_t> members(static_cast<std::size_t>(per_stage));
    std::iota(members.begin(), members.end(), stage * per_stage);
    manifest.meshes.emplace_back("stage", std::vector<std::string>{"dp"}, std::vector<std::int64_t>{per_stage},
                                 members);
    ParameterEntry parameter;
    parameter.elements = elements_of_stage[static_cast<std::size_t>(stage)];
    parameter.shape = {static_cast<std::int64_t>(parameter.elements)};
    parameter.mesh = manifest.meshes.size() - 1;
    parameter.placements = {Placement{.kind = Placement::Kind::shard}};
    manifest.parameters.push_back(parameter);
  }
  return manifest;
}

TEST(WorkPlan, EveryRankHasOneProcess) {
  const Manifest manifest = staged(12, {1000, 1000, 1000});
  for (int processes = 1; processes <= 20; ++processes) {
    const WorkPlan plan = plan_work(manifest, processes);
    ASSERT_EQ(plan.processes(), processes);
    std::int32_t next = 0;
    for (int process = 0; process < processes; ++process) {
      for (const std::int32_t rank : plan.ranks(process)) {
        EXPECT_EQ(rank, next++);
        EXPECT_EQ(plan.process_of(rank), process);
      }
    }
    EXPECT_EQ(next, 12);
  }
}

TEST(WorkPlan, TakesAnyAssignment) {
  const WorkPlan plan({2, 0, 2, 0, 3, 2}, 4);
  const auto ranks = [&](int process) {
    return std::vector<std::int32_t>(plan.ranks(process).begin(), plan.ranks(process).end());
  };
  EXPECT_EQ(ranks(0), (std::vector<std::int32_t>{1, 3}));
  EXPECT_EQ(ranks(1), (std::vector<std::int32_t>{}));
  EXPECT_EQ(ranks(2), (std::vector<std::int32_t>{0, 2, 5}));
  EXPECT_EQ(ranks(3), (std::vector<std::int32_t>{4}));
  EXPECT_EQ(plan.process_of(5), 2);
}

TEST(WorkPlan, GivesARankToAProcessThatSeesIt) {
  const Manifest manifest = staged(8, {8000});
  // Two processes on a host with the ranks 4 to 7 and 2, one on a host with 0 to 3.
  const WorkPlan plan = plan_work(manifest, {{{2, 4, 5, 6, 7}, {0, 1, 2, 3}}, {0, 1, 0}});
  for (const std::int32_t rank : {0, 1, 3}) EXPECT_EQ(plan.process_of(rank), 1);
  for (const std::int32_t rank : {4, 5, 6, 7}) EXPECT_NE(plan.process_of(rank), 1);
  EXPECT_EQ(plan.ranks(0).size() + plan.ranks(2).size(), 5U - (plan.process_of(2) == 1 ? 1U : 0U));
}

TEST(WorkPlan, NeedsNoSightWhereAllSeeAll) {
  const Manifest manifest = staged(4, {8000});
  const WorkPlan plan = plan_work(manifest, {{{0, 1, 2, 3}}, {0, 0}});
  for (std::int32_t rank = 0; rank < 4; ++rank)
    EXPECT_EQ(plan.process_of(rank), plan_work(manifest, 2).process_of(rank));
}

TEST(WorkPlan, BalancesBytesNotRanks) {
  // Stage 0's four ranks hold nine times what stage 1's hold.
  const WorkPlan plan = plan_work(staged(8, {9'000'000, 1'000'000}), 2);
  EXPECT_EQ(plan.ranks(0).size(), 2U);
}

TEST(WorkPlan, EqualRanksAreCutEvenly) {
  const WorkPlan plan = plan_work(staged(8, {8'000'000}), 4);
  for (int process = 0; process < 4; ++process) EXPECT_EQ(plan.ranks(process).size(), 2U);
}

TEST(WorkPlan, BytesFollowPlacements) {
  Manifest manifest = staged(4, {4000});
  EXPECT_EQ(bytes_by_rank(manifest), (std::vector<double>{4000, 4000, 4000, 4000}));
  manifest.parameters[0].placements[0].kind = Placement::Kind::replicate;
  EXPECT_EQ(bytes_by_rank(manifest), (std::vector<double>{16000, 16000, 16000, 16000}));
  manifest.parameters[0].mesh.reset();
  manifest.parameters[0].ranks = {1, 3};
  EXPECT_EQ(bytes_by_rank(manifest), (std::vector<double>{0, 16000, 0, 16000}));
}

TEST(WorkPlan, NoParametersStillSpreadTheFiles) {
  Manifest manifest;
  manifest.world_size = 6;
  const WorkPlan plan = plan_work(manifest, 3);
  for (int process = 0; process < 3; ++process) EXPECT_EQ(plan.ranks(process).size(), 2U);
}

}  // namespace
}  // namespace gradclip
