// count_tail_padding on the reference's examples, and label tokens counted over a dump's ranks.

#include "gradclip/training/label_tokens.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "dump_builder.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Values = std::vector<std::int64_t>;

std::uint64_t tail(const Values& labels, const Values& shape, std::int64_t ignore_label = kIgnoreIndex) {
  return count_tail_padding(labels, shape, ignore_label);
}

TEST(CountTailPadding, TheReferencesExample) {
  const Values labels{-100, 1, 1, -100, -100, -100, -100, 2, 3, 4, 5, 6, -100, -100, -100};
  EXPECT_EQ(tail(labels, {3, 5}), 5u);
}

TEST(CountTailPadding, ARowOfNothingElseCountsWhole) {
  EXPECT_EQ(tail(Values(8, -100), {2, 4}), 8u);
  EXPECT_EQ(tail({9, 0, 0, 0, 0, 0}, {2, 3}, 0), 5u);
}

TEST(CountTailPadding, OnlyTheIgnoredLabelPads) {
  EXPECT_EQ(tail({1, 2, 3, 4}, {2, 2}), 0u);
  EXPECT_EQ(tail({-100, 1, -100, 1}, {2, 2}), 0u);
  EXPECT_EQ(tail({1, -100}, {1, 2}, 0), 0u);
}

TEST(CountTailPadding, EmptyIsNone) {
  EXPECT_EQ(tail({}, {0, 5}), 0u);
  EXPECT_EQ(tail({}, {5, 0}), 0u);
}

TEST(CountTailPadding, OtherShapesAreRefused) {
  for (const Values& shape : {Values{4}, Values{}, Values{1, 2, 2}, Values{2, 3}, Values{-2, -2}}) {
    EXPECT_THROW(static_cast<void>(tail({1, 2, 3, -100}, shape)), Error);
  }
}

TEST(LabelCounter, PiecesOfAnyLengthCountTheSame) {
  Values labels;
  for (std::int64_t i = 0; i < 60; ++i) labels.push_back((i * i) % 7 < 4 ? -100 : i);
  LabelCounter whole(6, -100);
  whole.add(labels);
  EXPECT_EQ(whole.label_tokens(), static_cast<std::uint64_t>(std::count_if(labels.begin(), labels.end(),
                                                                           [](std::int64_t l) { return l != -100; })));
  EXPECT_GT(whole.tail_padding(), 0u);
  for (std::size_t piece = 1; piece < labels.size(); ++piece) {
    LabelCounter counter(6, -100);
    for (std::size_t first = 0; first < labels.size(); first += piece) {
      counter.add(std::span(labels).subspan(first, std::min(piece, labels.size() - first)));
    }
    EXPECT_EQ(counter.label_tokens(), whole.label_tokens()) << piece;
    EXPECT_EQ(counter.tail_padding(), whole.tail_padding()) << piece;
  }
}

class LabelTokensOf : public testing::Test {
 protected:
  LabelTokens count(const DumpBuilder& builder, const LabelOptions& options = {}) {
    builder.write();
    DumpReader dump(directory_.path());
    const auto comm = make_single_process_communicator();
    return count_label_tokens(dump, *comm, plan_work(dump.manifest(), 1), options);
  }
  DumpBuilder grid(std::vector<std::string> names = {"dp_shard", "tp"}) {
    DumpBuilder dump(directory_.path(), 4);
    dump.mesh("world", std::move(names), {2, 2}, {0, 1, 2, 3}).member("device_mesh", "\"world\"");
    return dump;
  }

  TemporaryDirectory directory_;
};

TEST_F(LabelTokensOf, EachCoordinateCountsOnce) {
  DumpBuilder dump = grid();
  for (const std::int32_t rank : {0, 1}) dump.labels(rank, 1, 4, {1, -100, 2, -100}).labels(rank, 1, 2, {3, 4});
  dump.labels(3, 1, 4, {-100, -100, 5, 6}).labels(3, 1, 2, {-100, -100});
  const LabelTokens counted = count(dump);
  EXPECT_EQ(counted.total.label_tokens, 6u);
  EXPECT_EQ(counted.total.tail_padding, 3u);
  EXPECT_EQ(counted.total.elements, 12u);
  EXPECT_EQ(counted.total.sequences, 4u);
  EXPECT_EQ(counted.total.microbatches, 2u);
  ASSERT_EQ(counted.by_microbatch.size(), 2u);
  EXPECT_EQ(counted.by_microbatch[0].label_tokens, 4u);
  EXPECT_EQ(counted.by_microbatch[1].label_tokens, 2u);
  ASSERT_EQ(counted.ranks.size(), 3u);
  EXPECT_TRUE(counted.ranks[0].counted && !counted.ranks[1].counted && counted.ranks[2].counted);
  EXPECT_EQ(counted.ranks[2].coordinate, 1u);
  EXPECT_THAT(counted.dp_axes, ElementsAre("dp_shard"));
  EXPECT_TRUE(counted.complete());
  EXPECT_THAT(counted.findings, IsEmpty());
}

TEST_F(LabelTokensOf, CopiesThatDifferAreAFinding) {
  DumpBuilder dump = grid();
  dump.labels(0, 2, 2, {1, 2, 3, 4}).labels(1, 2, 2, {1, 2, -100, 5});
  dump.labels(2, 1, 1, {7}).labels(3, 1, 2, {7, 7});
  const LabelTokens counted = count(dump);
  EXPECT_EQ(counted.total.label_tokens, 5u);  // the lowest ranks'
  ASSERT_EQ(counted.findings.size(), 2u);
  EXPECT_EQ(counted.findings[0].kind, "labels-differ");
  EXPECT_THAT(counted.findings[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(*counted.findings[0].index, ElementsAre(0, 1, 0));
  EXPECT_EQ(counted.findings[0].value, 2.0);
  EXPECT_THAT(counted.findings[0].message, HasSubstr("the first is -100, there 3"));
  EXPECT_THAT(counted.findings[1].ranks, ElementsAre(2, 3));
  EXPECT_FALSE(counted.findings[1].index.has_value());
  EXPECT_THAT(counted.findings[1].message, HasSubstr("microbatch 0 are [1, 2], rank 2's [1, 1]"));
}

TEST_F(LabelTokensOf, CoordinatesWithoutLabelsAreAFinding) {
  const LabelTokens counted = count(grid().labels(1, 1, 1, {1}));
  EXPECT_FALSE(counted.complete());
  ASSERT_EQ(counted.findings.size(), 1u);
  EXPECT_EQ(counted.findings[0].kind, "labels-missing");
  EXPECT_THAT(counted.findings[0].ranks, ElementsAre(2, 3));
}

TEST_F(LabelTokensOf, CoordinatesWithFewerMicrobatchesAreAFinding) {
  DumpBuilder dump = grid();
  for (const std::int64_t label : {1, 2, 3}) dump.labels(1, 1, 1, {label});
  dump.labels(2, 1, 1, {4});
  const LabelTokens counted = count(dump);
  EXPECT_FALSE(counted.complete());
  EXPECT_EQ(counted.total.label_tokens, 4u);
  ASSERT_EQ(counted.findings.size(), 1u);
  EXPECT_EQ(counted.findings[0].kind, "labels-incomplete");
  EXPECT_EQ(counted.findings[0].value, 1.0);
  EXPECT_THAT(counted.findings[0].ranks, ElementsAre(2));
  EXPECT_THAT(counted.findings[0].message, HasSubstr("1 of 2 data-parallel coordinates"));
  EXPECT_THAT(counted.findings[0].message, HasSubstr("coordinate 1 (rank 2) has none of microbatches 1 to 2"));
}

TEST_F(LabelTokensOf, AxesOfOtherNamesAreAskedFor) {
  DumpBuilder dump = grid({"data", "model"});
  for (const std::int32_t rank : {0, 2}) dump.labels(rank, 1, 1, {rank});
  EXPECT_THROW(static_cast<void>(count(dump)), Error);
  LabelOptions options;
  options.dp_axes = {"data"};
  EXPECT_EQ(count(dump, options).total.label_tokens, 2u);
  options.dp_axes = {"batch"};
  try {
    static_cast<void>(count(dump, options));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr("'data', 'model'"));
  }
}

TEST_F(LabelTokensOf, ThePipelineAxisMayHaveAnotherName) {
  DumpBuilder dump = grid({"stage", "dp"});
  dump.labels(2, 1, 1, {1}).labels(3, 1, 1, {2});
  LabelOptions options;
  options.pp_axis_name = "stage";
  const LabelTokens counted = count(dump, options);
  EXPECT_TRUE(counted.complete());
  EXPECT_EQ(counted.total.label_tokens, 2u);
}

TEST_F(LabelTokensOf, ContextParallelRanksHoldWholeSequences) {
  DumpBuilder dump = grid({"cp", "dp_replicate"});
  for (std::int32_t rank = 0; rank < 4; ++rank) dump.labels(rank, 1, 3, {rank % 2, 5, -100});
  const LabelTokens counted = count(dump);
  EXPECT_EQ(counted.total.label_tokens, 4u);
  EXPECT_THAT(counted.findings, IsEmpty());
}

TEST_F(LabelTokensOf, TheOnlyMeshServesWhereNoneIsTheDeviceMesh) {
  DumpBuilder dump(directory_.path(), 2);
  dump.mesh("tp", {"tp"}, {2}, {0, 1}).labels(0, 1, 1, {1}).labels(1, 1, 1, {1});
  EXPECT_EQ(count(dump).total.label_tokens, 1u);
}

TEST_F(LabelTokensOf, WithoutAMeshEveryRankHasItsOwn) {
  DumpBuilder dump(directory_.path(), 2);
  dump.labels(0, 1, 2, {1, -100}).labels(1, 1, 2, {1, -100});
  const LabelTokens counted = count(dump);
  EXPECT_EQ(counted.total.label_tokens, 2u);
  EXPECT_TRUE(counted.complete());
}

TEST_F(LabelTokensOf, TheRecordedNumberIsCompared) {
  DumpBuilder dump(directory_.path(), 1);
  dump.labels(0, 1, 2, {1, -100}).training("num_label_tokens", "2");
  const LabelTokens counted = count(dump);
  ASSERT_EQ(counted.findings.size(), 1u);
  EXPECT_EQ(counted.findings[0].kind, "label-tokens");
  EXPECT_EQ(counted.findings[0].value, 2.0);
  LabelOptions options;
  options.ignore_index = 7;
  EXPECT_THAT(count(dump, options).findings, IsEmpty());
  dump.member("microbatch", R"({"index": 0, "count": 4})");
  EXPECT_THAT(count(dump).findings, IsEmpty());
}

}  // namespace
}  // namespace gradclip::test
