#include "gradclip/report/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "small_model.hpp"

namespace gradclip {
namespace {

using testing::ElementsAre;

Report small_report() {
  return clip_report("clip", "in", small_manifest(), TrainingStep{}, ClipOptions{}, small_result(), "out", ReportRun{});
}

TEST(Report, ReadsTotalsFromTheResult) {
  const Report report = small_report();
  EXPECT_EQ(report.norm->total, 13.0);
  EXPECT_EQ(report.norm->statistics->elements, 19u);
  EXPECT_EQ(report.norm->statistics->zeros, 4u);
  EXPECT_EQ(report.clip->total_after, 6.5);
  EXPECT_EQ(report.reference->recorded, 13.0);
  EXPECT_EQ(report.reference->recorded_distance, 0.0);
  EXPECT_EQ(report.reference->totals[0].coefficient, clip_coefficient(13.0, 6.5));
}

TEST(Report, CountsStoredBytesWithTheirCopies) {
  const Report report = small_report();
  EXPECT_EQ(report.parameters[0].bytes, 8u * 4) << "Shard: once";
  EXPECT_EQ(report.parameters[1].bytes, 3u * 4 * 2) << "Replicate over two ranks";
  EXPECT_EQ(report.parameters[4].bytes, 2u * 4 * 2) << "plain tensors of two ranks";
  EXPECT_EQ(report.dump.elements, 8u + 3 + 4 + 8 + 2 * 2);
  EXPECT_EQ(report.dump.bytes, 32u + 24 + 8 + 32 + 16);
}

TEST(Report, PlacesTheFirstNonFiniteElementInGlobalCoordinates) {
  ClipResult result = small_result();
  TensorStatistics& statistics = result.norm->parameters[0].statistics;
  statistics.nan = 1;
  statistics.first_nonfinite = 5;
  statistics.first_nonfinite_rank = 1;
  const Report report =
      clip_report("norms", "in", small_manifest(), TrainingStep{}, ClipOptions{}, result, std::nullopt, ReportRun{});
  EXPECT_THAT(report.parameters[0].first_nonfinite->index, ElementsAre(2, 1));
  EXPECT_EQ(report.parameters[0].first_nonfinite->rank, 1);
  EXPECT_EQ(first_nonfinite_parameter(report), 0u);
  EXPECT_FALSE(report.clip.has_value()) << "norms does not clip";
}

TEST(Report, AScalarsIndexIsEmpty) {
  Manifest manifest = small_manifest();
  manifest.parameters[1].shape = {};
  ClipResult result = small_result();
  result.norm->parameters[1].statistics.posinf = 1;
  result.norm->parameters[1].statistics.first_nonfinite = 0;
  const Report report =
      clip_report("norms", "in", manifest, TrainingStep{}, ClipOptions{}, result, std::nullopt, ReportRun{});
  ASSERT_TRUE(report.parameters[1].first_nonfinite.has_value());
  EXPECT_TRUE(report.parameters[1].first_nonfinite->index.empty());
}

TEST(Report, WithoutAFirstPassThereAreNoStatistics) {
  ClipResult result = small_result();
  result.norm.reset();
  const Report report =
      clip_report("clip", "in", small_manifest(), TrainingStep{}, ClipOptions{}, result, "out", ReportRun{});
  EXPECT_EQ(report.norm->total, 13.0);
  EXPECT_FALSE(report.norm->statistics.has_value());
  EXPECT_FALSE(report.reference.has_value());
  EXPECT_FALSE(report.parameters[0].norm.has_value());
  EXPECT_FALSE(report.groups[0].norm.has_value());
  EXPECT_EQ(report.parameters[0].elements, 8u);
}

TEST(Report, NamesTheNearestOfSeveralTotals) {
  ClipResult result = small_result();
  result.norm->reference.totals = {{.total = 20.0, .ranks = {0, 1}}, {.total = 13.5, .ranks = {2, 3}}};
  result.coefficient.reset();
  result.coefficients = {0.25, 0.5};
  Manifest manifest = small_manifest();
  manifest.training.grad_norm = 13.6;
  const Report report = clip_report("clip", "in", manifest, TrainingStep{}, ClipOptions{}, result, "out", ReportRun{});
  EXPECT_EQ(report.reference->recorded_nearest, 1u);
  EXPECT_NEAR(*report.reference->recorded_distance_reference, 0.1 / 13.6, 1e-12);
  EXPECT_EQ(report.reference->totals[1].coefficient, 0.5);
  EXPECT_FALSE(report.clip->coefficient.has_value());
}

TEST(Report, ANaNThatWasRecordedIsNearANaN) {
  ClipResult result = small_result();
  result.norm->total = std::nan("");
  Manifest manifest = small_manifest();
  manifest.training.grad_norm = std::nan("");
  const Report report = clip_report("clip", "in", manifest, TrainingStep{}, ClipOptions{}, result, "out", ReportRun{});
  EXPECT_EQ(report.reference->recorded_distance, 0.0);
  EXPECT_FALSE(report.reference->recorded_distance_reference.has_value());
}

TEST(Report, InspectReadsTheManifestAlone) {
  const Report report = inspect_report("in", small_manifest());
  ASSERT_TRUE(report.contents.has_value());
  EXPECT_EQ(report.meshes.size(), 3u);
  EXPECT_TRUE(report.meshes[0].device_mesh);
  ASSERT_EQ(report.contents->plain_tensors.size(), 1u);
  EXPECT_EQ(report.contents->plain_tensors[0].copies, "distinct");
  EXPECT_FALSE(report.norm.has_value());
  EXPECT_EQ(report.groups.size(), 4u);
}

}  // namespace
}  // namespace gradclip
