// Which ranks are reduced in which collective, and what is divided where.

#include "gradclip/training/reduction_plan.hpp"

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "gradclip/base/error.hpp"

namespace gradclip::test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

/// One parameter of four rows on a mesh, as text of the manifest.
Manifest manifest_of(const std::string& mesh, const std::string& entry, const std::string& more = "") {
  return parse_manifest(
      R"JSON({"format": "gradclip.dump", "version": 1, "world_size": 8, "rank_file": "rank_{rank}.h5",)JSON"
      R"JSON("meshes": {"mesh": )JSON" +
          mesh + R"JSON(}, "parameters": [{"name": "w", "shape": [8, 2], "mesh": "mesh", )JSON" + entry + "}]" + more +
          "}",
      "test");
}

const std::string kHsdp = R"JSON({"dim_names": ["dp_replicate", "dp_shard"], "ranks": [[0, 1, 2], [3, 4, 5]]})JSON";
const std::string kSharded = R"JSON("dtype": "bfloat16", "placements": ["Replicate()", "Shard(0)"],)JSON"
                             R"JSON("gradient_placements": ["Partial(avg)", "Partial(avg)"])JSON";

ReductionPlan plan_of(const Manifest& manifest, const AccumulationTypes& given = {}) {
  return plan_reduction(manifest, manifest.parameters[0], given);
}

TEST(DivisionBefore, IsAPowerOfTwoNearTheRoot) {
  const std::vector<double> expected{1, 2, 2, 2, 2, 4, 2, 4, 2, 4, 2, 4, 2, 4, 2, 4};
  for (std::size_t n = 1; n <= expected.size(); ++n) {
    EXPECT_EQ(division_before(static_cast<double>(n)), expected[n - 1]) << n;
  }
  EXPECT_EQ(division_before(1024), 32);
}

TEST(ReductionPlan, ScattersBeforeItAddsCopies) {
  const Manifest manifest = manifest_of(kHsdp, kSharded);
  const ReductionPlan plan = plan_of(manifest);
  EXPECT_EQ(plan.reduce, DType::float32);
  EXPECT_EQ(plan.output.dtype, DType::float32);
  EXPECT_FALSE(plan.output.gradient_placements);
  ASSERT_THAT(plan.reductions, SizeIs(2));
  EXPECT_THAT(plan.reductions[0].dimensions, ElementsAre(false, true));
  EXPECT_EQ(plan.reductions[0].ranks, 3u);
  EXPECT_EQ(plan.reductions[0].divisor, 3);
  EXPECT_EQ(plan.reductions[1].divisor, 2);
  EXPECT_EQ(plan.before * plan.after, 1);
  EXPECT_THAT(plan.addends(manifest, 4), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(plan.addends(manifest, 0), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(ReductionPlan, DividesAroundTheSumsOfFloat16AndFloat64) {
  const Manifest manifest = manifest_of(kHsdp, kSharded);
  for (const DType reduce : {DType::float16, DType::float64}) {
    const ReductionPlan plan = plan_of(manifest, {.reduce = reduce, .storage = {}});
    ASSERT_THAT(plan.reductions, SizeIs(2));
    EXPECT_EQ(plan.reductions[0].divisor, 1);
    EXPECT_EQ(plan.reductions[1].divisor, 1);
    EXPECT_EQ(plan.before, 4);
    EXPECT_EQ(plan.after, 1.5);
  }
}

TEST(ReductionPlan, TakesContextParallelismIntoTheShardedGroup) {
  const Manifest manifest = manifest_of(
      R"JSON({"dim_names": ["dp_replicate", "dp_shard", "cp"], "ranks": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]})JSON",
      R"JSON("dtype": "float32", "placements": ["Replicate()", "Shard(0)", "Replicate()"],)JSON"
      R"JSON("gradient_placements": ["Partial(avg)", "Partial(avg)", "Partial(avg)"])JSON");
  const ReductionPlan plan = plan_of(manifest);
  ASSERT_THAT(plan.reductions, SizeIs(2));
  EXPECT_THAT(plan.reductions[0].dimensions, ElementsAre(false, true, true));
  EXPECT_THAT(plan.reductions[1].dimensions, ElementsAre(true, false, false));
}

TEST(ReductionPlan, ReducesCopiesInOneCollective) {
  const Manifest manifest = manifest_of(R"JSON({"dim_names": ["dp", "cp"], "ranks": [[0, 1], [2, 3]]})JSON",
                                        R"JSON("dtype": "float32", "placements": ["Replicate()", "Replicate()"],)JSON"
                                        R"JSON("gradient_placements": ["Partial(avg)", "Partial(avg)"])JSON");
  const ReductionPlan plan = plan_of(manifest);
  ASSERT_THAT(plan.reductions, SizeIs(1));
  EXPECT_EQ(plan.reductions[0].ranks, 4u);
  EXPECT_EQ(plan.reductions[0].divisor, 4);
  EXPECT_EQ(plan.sums, 0u);
}

TEST(ReductionPlan, FinishesASumOverTensorParallelismBeforeItAverages) {
  const Manifest manifest = manifest_of(R"JSON({"dim_names": ["dp_shard", "tp"], "ranks": [[0, 1], [2, 3]]})JSON",
                                        R"JSON("dtype": "float32", "placements": ["Shard(0)", "Replicate()"],)JSON"
                                        R"JSON("gradient_placements": ["Partial(avg)", "Partial(sum)"])JSON");
  const ReductionPlan plan = plan_of(manifest);
  ASSERT_THAT(plan.reductions, SizeIs(2));
  EXPECT_THAT(plan.reductions[0].dimensions, ElementsAre(false, true));
  EXPECT_EQ(plan.reductions[0].divisor, 1);
  EXPECT_THAT(plan.reductions[1].dimensions, ElementsAre(true, false));
  EXPECT_EQ(plan.reductions[1].divisor, 2);
  EXPECT_EQ(plan.sums, 1u);
  EXPECT_THAT(plan.addends(manifest, 3), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(plan_of(manifest, {.reduce = DType::float16, .storage = {}}).before, 2);
}

TEST(ReductionPlan, LeavesWhatIsNotPartial) {
  const Manifest manifest =
      manifest_of(kHsdp, R"JSON("dtype": "float64", "placements": ["Replicate()", "Shard(1)"])JSON");
  const ReductionPlan plan = plan_of(manifest);
  EXPECT_THAT(plan.reductions, IsEmpty());
  EXPECT_EQ(plan.reduce, DType::float64);
  EXPECT_EQ(plan.before, 1);
  EXPECT_THAT(plan.addends(manifest, 3), ElementsAre(3));
}

TEST(ReductionPlan, TakesTheStrongestWordForTheTypes) {
  const std::string step = R"JSON(, "accumulation": {"reduce_dtype": "bfloat16", "storage_dtype": "float16"})JSON";
  const ReductionPlan recorded = plan_of(manifest_of(kHsdp, kSharded, step));
  EXPECT_EQ(recorded.reduce, DType::bfloat16);
  EXPECT_EQ(recorded.output.dtype, DType::float16);
  const std::string own = kSharded + R"JSON(, "reduce_dtype": "float32", "storage_dtype": "float64")JSON";
  const ReductionPlan parameter = plan_of(manifest_of(kHsdp, own, step));
  EXPECT_EQ(parameter.reduce, DType::float32);
  EXPECT_EQ(parameter.output.dtype, DType::float64);
  const ReductionPlan given =
      plan_of(manifest_of(kHsdp, own, step), {.reduce = DType::float64, .storage = DType::bfloat16});
  EXPECT_EQ(given.reduce, DType::float64);
  EXPECT_EQ(given.output.dtype, DType::bfloat16);
}

TEST(ReductionPlan, RefusesWhatNoReductionMakes) {
  const auto refused = [](const std::string& entry) {
    const Manifest manifest = manifest_of(kHsdp, R"JSON("dtype": "float32", )JSON" + entry);
    EXPECT_THROW(static_cast<void>(plan_of(manifest)), Error) << entry;
  };
  refused(R"JSON("placements": ["Replicate()", "Shard(0)"], "gradient_placements": ["Partial(max)", "Shard(0)"])JSON");
  refused(
      R"JSON("placements": ["Replicate()", "Replicate()"], "gradient_placements": ["Replicate()", "Shard(0)"])JSON");
  // Every rank would keep the average, and what reads the output would add them up.
  refused(R"JSON("placements": ["Partial(sum)", "Shard(0)"], "gradient_placements": ["Partial(avg)", "Shard(0)"])JSON");
}

}  // namespace
}  // namespace gradclip::test
