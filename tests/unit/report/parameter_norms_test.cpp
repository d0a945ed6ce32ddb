#include "gradclip/norm/parameter_norms.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "small_model.hpp"

namespace gradclip {
namespace {

using testing::ElementsAre;

TEST(ParameterNorms, GroupsAreMeshAndPlacementsInOrderOfTheirFirstParameters) {
  const Manifest manifest = small_manifest();
  const std::vector<ShardingGroup> groups = sharding_groups(manifest);
  ASSERT_EQ(groups.size(), 4u);
  EXPECT_EQ(groups[0].mesh, 1u);
  EXPECT_THAT(groups[0].parameters, ElementsAre(0));
  EXPECT_THAT(groups[1].parameters, ElementsAre(1));
  EXPECT_EQ(groups[2].mesh, 2u);
  EXPECT_THAT(groups[2].parameters, ElementsAre(2, 3));
  EXPECT_FALSE(groups[3].mesh.has_value());
  EXPECT_THAT(groups[3].parameters, ElementsAre(4));
}

TEST(ParameterNorms, StagesAreCoordinatesOfThePipelineAxis) {
  const Manifest manifest = small_manifest();
  const std::vector<PipelineStage> stages = pipeline_stages(manifest, "pp");
  ASSERT_EQ(stages.size(), 2u);
  EXPECT_EQ(stages[0].stage, 0);
  EXPECT_THAT(stages[0].parameters, ElementsAre(0, 1));
  EXPECT_EQ(stages[1].stage, 1);
  EXPECT_THAT(stages[1].parameters, ElementsAre(2, 3, 4));
  EXPECT_THAT(stages[1].model_parts, ElementsAre(0, 1));
}

TEST(ParameterNorms, WithoutThatAxisTheModelIsOneStage) {
  Manifest manifest = small_manifest();
  EXPECT_EQ(pipeline_stages(manifest, "stage").size(), 1u);
  manifest.device_mesh.reset();
  const std::vector<PipelineStage> stages = pipeline_stages(manifest, "pp");
  ASSERT_EQ(stages.size(), 1u);
  EXPECT_EQ(stages[0].stage, 0);
  EXPECT_EQ(stages[0].parameters.size(), 5u);
}

TEST(ParameterNorms, APipelineAxisThatIsNotTheFirstAndRanksOutOfOrder) {
  Manifest manifest = small_manifest();
  manifest.meshes[0] = DeviceMesh("world", {"dp", "pp"}, {2, 2}, {2, 0, 3, 1});
  const std::vector<PipelineStage> stages = pipeline_stages(manifest, "pp");
  ASSERT_EQ(stages.size(), 2u);
  EXPECT_THAT(stages[0].parameters, ElementsAre(2, 3, 4));
  EXPECT_THAT(stages[1].parameters, ElementsAre(0, 1));
}

TEST(ParameterNorms, HoldersOutsideTheDeviceMeshHaveNoStage) {
  Manifest manifest = small_manifest();
  manifest.meshes[0] = DeviceMesh("world", {"pp"}, {2}, {0, 1});
  const std::vector<PipelineStage> stages = pipeline_stages(manifest, "pp");
  ASSERT_EQ(stages.size(), 2u);
  EXPECT_EQ(stages[0].stage, 0) << "held by stages 0 and 1: the first";
  EXPECT_FALSE(stages[1].stage.has_value());
  EXPECT_THAT(stages[1].parameters, ElementsAre(2, 3, 4));
}

TEST(ParameterNorms, LaterEntriesOfATiedWeightAddNothing) {
  const Manifest manifest = small_manifest();
  const ClipResult result = small_result();
  const std::vector<GroupNorm> norms = stage_norms(*result.norm, pipeline_stages(manifest, "pp"));
  EXPECT_EQ(norms[0].norm, 5.0);
  EXPECT_EQ(norms[1].norm, 12.0);
  EXPECT_EQ(norms[1].statistics.elements, 8u);
  EXPECT_NEAR(norms[0].share + norms[1].share, 1.0, 1e-15);
  const std::vector<GroupNorm> types = dtype_norms(*result.norm, type_groups(manifest));
  ASSERT_EQ(types.size(), 2u);
  EXPECT_EQ(types[0].norm, 5.0);
  EXPECT_EQ(types[1].norm, 12.0);
}

TEST(ParameterNorms, NonFiniteValuesStayWhereTheyAre) {
  ClipResult result = small_result();
  result.norm->parameters[2].statistics.nan = 1;
  result.norm->total = std::nan("");
  const std::vector<GroupNorm> norms = group_norms(*result.norm, sharding_groups(small_manifest()));
  EXPECT_EQ(norms[0].norm, 3.0);
  EXPECT_TRUE(std::isnan(norms[2].norm));
  EXPECT_TRUE(std::isnan(norms[0].share));
}

TEST(ParameterNorms, InfinityNormIsTheLargestMagnitude) {
  ClipResult result = small_result();
  result.norm->order = NormOrder{std::numeric_limits<double>::infinity()};
  result.norm->total = 12.0;
  const std::size_t both[] = {0, 1};
  const GroupNorm group = norm_of(*result.norm, both);
  EXPECT_EQ(group.norm, 4.0);
  EXPECT_EQ(group.share, 0.0);  // the limit of (4 / 12)^p
}

TEST(ParameterNorms, SharesOfNormsBeyondTheirSquaresRange) {
  ClipResult result = small_result();
  result.norm->parameters[0].statistics.powers = {9.0, 1000};  // a norm of 3 x 2^1000
  result.norm->total = std::ldexp(3.0, 1000);
  const std::size_t first[] = {0};
  const GroupNorm group = norm_of(*result.norm, first);
  EXPECT_EQ(group.norm, std::ldexp(3.0, 1000));
  EXPECT_EQ(group.share, 1.0);
}

}  // namespace
}  // namespace gradclip
