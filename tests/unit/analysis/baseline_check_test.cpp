#include "gradclip/analysis/baseline_check.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

BaselineParameter parameter(const std::string& name, double norm, std::uint64_t zeros = 0) {
  return {name, {4}, DType::float32, {4, zeros, 0, 0, 0, norm, norm / 2}};
}

/// Norms 3 and 4: total 5.
Baseline sample() {
  Baseline baseline;
  baseline.conditions = {2.0, "exact", std::nullopt, std::nullopt};
  baseline.total = {8, 0, 0, 0, 0, 5.0, 2.0};
  baseline.parameters = {parameter("a", 3.0), parameter("b", 4.0)};
  return baseline;
}

Finding seen(const std::string& kind, const std::string& name = "") {
  Finding finding;
  finding.kind = kind;
  finding.parameter = name;
  finding.message = "so it is";
  return finding;
}

CheckResult check(const Baseline& recorded, const Baseline& measured, const CheckOptions& options = {},
                  const std::vector<Finding>& findings = {}) {
  return check_against(&recorded, measured, findings, options);
}

std::vector<std::string> kinds(const std::vector<Finding>& findings) {
  std::vector<std::string> all;
  for (const Finding& finding : findings) {
    all.push_back(finding.kind + (finding.parameter.empty() ? "" : " " + finding.parameter));
  }
  return all;
}

TEST(Check, TheSameFits) {
  const CheckResult result = check(sample(), sample());
  EXPECT_EQ(result.outcome, CheckOutcome::passed);
  EXPECT_TRUE(result.passes());
  ASSERT_EQ(result.entries.size(), 3u);
  std::vector<std::string_view> items;
  for (const CheckItem& item : result.entries[1].items) items.push_back(item.what);
  EXPECT_THAT(items, ElementsAre("nonfinite", "shape", "dtype", "elements", "zeros", "nan", "posinf", "neginf", "norm",
                                 "max_abs"));
}

TEST(Check, NormsMayBeOffByTheTolerance) {
  Baseline measured = sample();
  measured.parameters[0].numbers.norm = 3.0 * (1 + 0.9e-6);
  EXPECT_EQ(check(sample(), measured).outcome, CheckOutcome::passed);
  measured.parameters[0].numbers.norm = 3.0 * (1 - 1.1e-6);
  const CheckResult result = check(sample(), measured);
  EXPECT_EQ(result.outcome, CheckOutcome::regressed);
  EXPECT_THAT(kinds(result.findings), ElementsAre("differs a"));
  EXPECT_NEAR(*result.findings[0].value, 1.1e-6, 1e-12);
  EXPECT_THAT(result.findings[0].message, HasSubstr("baseline 3 (off by 3.3e-06"));

  EXPECT_TRUE(check(sample(), measured, {.relative = 1e-5}).passes());
  EXPECT_TRUE(check(sample(), measured, {.relative = 0.0, .absolute = 1e-5}).passes());
  EXPECT_TRUE(check(sample(), measured, {.relative = kInfinity}).passes());
  EXPECT_FALSE(check(sample(), measured, {.relative = 0.0}).passes());
}

TEST(Check, ATinyNormIsJudgedByItself) {
  Baseline recorded = sample(), measured = sample();
  recorded.parameters[0].numbers.norm = 1e-20;
  measured.parameters[0].numbers.norm = 2e-20;
  EXPECT_THAT(kinds(check(recorded, measured).findings), ElementsAre("differs a"));
  recorded.parameters[0].numbers.norm = 0.0;
  const CheckResult result = check(recorded, measured);
  EXPECT_THAT(kinds(result.findings), ElementsAre("differs a"));
  EXPECT_EQ(result.findings[0].value, kInfinity);
  EXPECT_TRUE(check(recorded, measured, {.absolute = 1e-19}).passes());
}

TEST(Check, CountsTypesAndShapesAreExact) {
  const auto kind_of = [](auto change) {
    Baseline measured = sample();
    change(measured.parameters[1]);
    const CheckResult result = check(sample(), measured, {.relative = 1.0, .absolute = 1.0, .allow_nonfinite = true});
    return kinds(result.findings);
  };
  EXPECT_THAT(kind_of([](BaselineParameter& p) { p.numbers.zeros = 1; }), ElementsAre("differs b"));
  EXPECT_THAT(kind_of([](BaselineParameter& p) { p.numbers.elements = 5; }), ElementsAre("differs b"));
  EXPECT_THAT(kind_of([](BaselineParameter& p) { p.numbers.nan = 1; }), ElementsAre("differs b"));
  EXPECT_THAT(kind_of([](BaselineParameter& p) { p.dtype = DType::bfloat16; }), ElementsAre("dtype b"));
  EXPECT_THAT(kind_of([](BaselineParameter& p) { p.shape = {2, 2}; }), ElementsAre("shape b"));
  EXPECT_THAT(kind_of([](BaselineParameter& p) { p.shape = {}, p.dtype = DType::float64; }), ElementsAre("shape b"));
}

TEST(Check, TheFirstRuleThatMatchesApplies) {
  Baseline recorded = sample(), measured = sample();
  recorded.rules = {{"^a$", 1e-2, std::nullopt, 0.5}, {".", 1e-9, std::nullopt, std::nullopt}, {"never", 1, 1, 1}};
  recorded.parameters[0].numbers.zeros = 2;
  measured.parameters[0].numbers.zeros = 3;
  measured.parameters[0].numbers.norm = 3.02;
  measured.parameters[1].numbers.norm = 4.0 * (1 + 1e-8);
  const CheckResult result = check(recorded, measured, {.relative = 1.0});
  EXPECT_THAT(kinds(result.findings), ElementsAre("differs b"));
  EXPECT_THAT(result.unused_patterns, ElementsAre("never"));
  measured.parameters[0].numbers.zeros = 4;
  EXPECT_THAT(kinds(check(recorded, measured).findings), ElementsAre("differs b", "differs a"));
}

TEST(Check, NewAndGoneParametersAreNamed) {
  Baseline measured = sample();
  measured.parameters[0].name = "c";
  const CheckResult result = check(sample(), measured);
  EXPECT_THAT(kinds(result.findings), ElementsAre("missing a", "extra c"));
  EXPECT_EQ(result.entries.back().name, "a");
}

TEST(Check, SeveralEntriesOfOneNameAreComparedInTheirOrder) {
  Baseline recorded = sample();
  recorded.parameters = {parameter("n", 1.0), parameter("n", 2.0), parameter("n", 3.0)};
  EXPECT_TRUE(check(recorded, recorded).passes());
  Baseline measured = recorded;
  measured.parameters.pop_back();
  EXPECT_THAT(kinds(check(recorded, measured).findings), ElementsAre("missing n"));
  measured = recorded;
  std::swap(measured.parameters[0], measured.parameters[1]);
  EXPECT_THAT(kinds(check(recorded, measured).findings), ElementsAre("differs n", "differs n"));
}

TEST(Check, AnEntryThatIsGoneDoesNotMoveTheOthersOfItsName) {
  Baseline whole = sample();
  whole.parameters = {parameter("n", 1.0), parameter("n", 2.0), parameter("n", 3.0)};
  Baseline less = whole;
  less.parameters.erase(less.parameters.begin());
  const CheckResult gone = check(whole, less);
  ASSERT_THAT(kinds(gone.findings), ElementsAre("missing n"));
  EXPECT_EQ(gone.findings[0].message,
            "the baseline has 3 entries of that name, the dump 2: the baseline's no. 1 is without a counterpart");
  const CheckResult added = check(less, whole);
  ASSERT_THAT(kinds(added.findings), ElementsAre("extra n"));
  EXPECT_EQ(added.findings[0].message,
            "the baseline has 2 entries of that name, the dump 3: the dump's no. 1 is without a counterpart");
  less.parameters[1].numbers.norm = 3.5;  // fits none: in its order
  const CheckResult changed = check(whole, less);
  ASSERT_THAT(kinds(changed.findings), ElementsAre("missing n", "differs n"));
  EXPECT_THAT(changed.findings[1].message, testing::StartsWith("no. 2 of 2 entries: norm 3.5, baseline 3 "));
  less.parameters.clear();
  EXPECT_EQ(check(whole, less).findings[2].message, "the baseline has it, the dump does not");
}

TEST(Check, HowManyEntriesATiedWeightHasIsNoNews) {
  Baseline one = sample(), two = sample();
  two.parameters.push_back(parameter("a", 3.0));
  two.parameters.back().counted = false;
  EXPECT_TRUE(check(one, two).passes());
  EXPECT_TRUE(check(two, one).passes());
  two.parameters.back().numbers.norm = 3.5;
  EXPECT_THAT(kinds(check(one, two).findings), ElementsAre("differs a"));
  EXPECT_TRUE(check(two, one).passes());
  one.parameters.erase(one.parameters.begin());
  EXPECT_THAT(kinds(check(two, one).findings), ElementsAre("missing a", "missing a"));
  EXPECT_THAT(kinds(check(one, two).findings), ElementsAre("extra a", "extra a"));
}

TEST(Check, NonFiniteValuesComeBeforeTheBaseline) {
  Baseline measured = sample();
  measured.parameters[1].numbers.nan = measured.total.nan = 1;
  measured.parameters[1].numbers.norm = measured.total.norm = std::nan("");
  const std::vector<Finding> findings{seen("replicas-differ", "a"), seen("nonfinite", "b")};
  for (const bool update : {false, true}) {
    const CheckResult result =
        check_against("/nonexistent", measured, findings, {.update = update, .allow_nonfinite = false});
    EXPECT_EQ(result.outcome, CheckOutcome::regressed);
    EXPECT_THAT(kinds(result.findings), ElementsAre("nonfinite b", "replicas-differ a"));
    EXPECT_FALSE(result.recorded);
    EXPECT_FALSE(result.next);
    EXPECT_FALSE(result.entries[2].passed());
    EXPECT_TRUE(result.entries[1].passed());
  }
  const CheckOptions allowed{.update = true, .allow_nonfinite = true};
  const CheckResult written = check_against("/nonexistent", measured, findings, allowed);
  EXPECT_EQ(written.outcome, CheckOutcome::updated);
  ASSERT_TRUE(written.next);

  Baseline recorded = measured;
  recorded.findings = {{"nonfinite", "b"}, {"replicas-differ", "a"}};
  EXPECT_TRUE(check(recorded, measured, {.allow_nonfinite = true}, findings).passes());
  recorded.parameters[1].numbers.norm = kInfinity;
  EXPECT_THAT(kinds(check(recorded, measured, {.allow_nonfinite = true}, findings).findings), ElementsAre("differs b"));
}

TEST(Check, AGateOverNothingIsRefused) {
  for (const bool update : {false, true}) {
    const CheckResult result = check(sample(), sample(), {.update = update}, {seen("nothing-seen")});
    EXPECT_THAT(kinds(result.findings), ElementsAre("nothing-seen"));
    EXPECT_FALSE(result.next);
  }
}

TEST(Check, NoBaselineIsAnOutcomeOfItsOwn) {
  const CheckResult result = check_against(nullptr, sample(), {seen("ranks-disagree")}, {});
  EXPECT_EQ(result.outcome, CheckOutcome::no_baseline);
  EXPECT_THAT(kinds(result.findings), ElementsAre("no-baseline"));
  EXPECT_THAT(result.findings[0].message, HasSubstr("--update"));
}

TEST(Check, OtherConditionsAreNamedAndNotCompared) {
  Baseline measured = sample();
  measured.conditions = {kInfinity, "torch", 4.0, 0.5};
  measured.parameters[0].numbers.norm = 99.0;
  const CheckResult result = check(sample(), measured);
  EXPECT_EQ(result.outcome, CheckOutcome::conditions_differ);
  EXPECT_EQ(result.findings.size(), 4u);
  EXPECT_EQ(result.findings[0].message, "norm type inf, in the baseline 2");
  EXPECT_EQ(result.findings[2].message, "label token divisor 4, in the baseline none");
  EXPECT_FALSE(result.entries[1].compared);
}

TEST(Check, FindingsThatTheBaselineKnowsAreNoNews) {
  Baseline recorded = sample();
  recorded.findings = {{"ranks-disagree", ""}, {"replicas-differ", "a"}};
  const CheckResult result =
      check(recorded, sample(), {}, {seen("replicas-differ", "a"), seen("replicas-differ", "b")});
  EXPECT_THAT(kinds(result.findings), ElementsAre("replicas-differ b"));
  ASSERT_EQ(result.known.size(), 2u);
  EXPECT_FALSE(result.known[0].seen);
  EXPECT_TRUE(result.known[1].seen);
  EXPECT_TRUE(check(recorded, sample()).passes());
}

TEST(Check, AKnownFindingThatBecameWorseIsNews) {
  const auto found = [](std::vector<std::int32_t> ranks, std::optional<double> value) {
    Finding finding = seen("replicas-differ", "a");
    finding.ranks = std::move(ranks);
    finding.value = value;
    return finding;
  };
  Baseline recorded = sample();
  recorded.tolerance = {0.125, 0.25, 0.0};
  recorded.findings = {{"replicas-differ", "a", {0, 2, 3}, 2.0}};
  const auto passes = [&](const Finding& finding, bool allowed = false) {
    return check(recorded, sample(), {.allow_nonfinite = allowed}, {finding}).passes();
  };
  EXPECT_TRUE(passes(found({0, 2, 3}, 2.0)));
  EXPECT_TRUE(passes(found({0, 3}, 1.0)));
  EXPECT_TRUE(passes(found({0, 3}, 2.5)));
  EXPECT_FALSE(passes(found({0, 3}, std::nextafter(2.5, 3.0))));
  EXPECT_FALSE(passes(found({0, 1}, 1.0)));
  EXPECT_FALSE(passes(found({0, 3}, std::nullopt)));
  EXPECT_FALSE(passes(found({0, 3}, std::nan(""))));
  EXPECT_FALSE(passes(found({0, 3}, std::nan("")), /*allowed=*/true));
  EXPECT_FALSE(passes(found({0, 3}, kInfinity), /*allowed=*/true));
  recorded.rules = {{"^a$", 1.0, std::nullopt, std::nullopt}};
  EXPECT_TRUE(passes(found({0, 3}, 4.25)));
  recorded.findings[0].value = std::nan("");
  EXPECT_TRUE(passes(found({0, 3}, std::nan("")), /*allowed=*/true));
  EXPECT_FALSE(passes(found({0, 3}, std::nan(""))));
  EXPECT_FALSE(passes(found({0, 3}, 1.0), /*allowed=*/true));
  const CheckResult worse = check(recorded, sample(), {}, {found({1}, 1.0)});
  ASSERT_EQ(worse.known.size(), 1u);
  EXPECT_TRUE(worse.known[0].seen);
  EXPECT_THAT(worse.findings[0].message, HasSubstr("worse than the baseline's"));
}

TEST(Check, CopiesWithNanAreNeverAcceptedUnlessTheyAreAllowed) {
  for (const char* kind : {"replicas-differ", "tied-differ"}) {
    for (const double value : {std::nan(""), kInfinity}) {
      Finding finding = seen(kind, "a");
      finding.value = value;
      const CheckResult refused = check_against(nullptr, sample(), {finding}, {.update = true});
      EXPECT_EQ(refused.outcome, CheckOutcome::regressed);
      EXPECT_FALSE(refused.next);
      EXPECT_TRUE(check_against(nullptr, sample(), {finding}, {.update = true, .allow_nonfinite = true}).next);
    }
  }
}

TEST(Check, UpdateSaysWhatChangedAndKeepsRules) {
  Baseline recorded = sample();
  recorded.rules = {{"b", 1.0, std::nullopt, std::nullopt}};
  recorded.tolerance.relative = 1e-3;
  Baseline measured = sample();
  measured.parameters[1].numbers.norm = std::nextafter(4.0, 5.0);
  measured.parameters.push_back(parameter("c", 1.0));
  measured.findings = {{"ranks-disagree", ""}};
  const CheckResult result = check(recorded, measured, {.absolute = 0.5, .update = true}, {seen("ranks-disagree")});
  EXPECT_EQ(result.outcome, CheckOutcome::updated);
  EXPECT_THAT(result.findings, IsEmpty());
  EXPECT_THAT(kinds(result.changes), ElementsAre("ranks-disagree", "extra c", "differs b", "tolerance"));
  ASSERT_TRUE(result.next);
  EXPECT_EQ(result.next->rules.size(), 1u);
  EXPECT_EQ(result.next->tolerance.relative, 1e-3);
  EXPECT_EQ(result.next->tolerance.absolute, 0.5);
  EXPECT_EQ(result.next->findings.size(), 1u);

  const CheckResult again = check(*result.next, measured, {.update = true}, {seen("ranks-disagree")});
  EXPECT_EQ(again.outcome, CheckOutcome::unchanged);
  EXPECT_FALSE(again.next);
}

TEST(Check, TheWorstComesFirst) {
  Baseline recorded = sample(), measured = sample();
  recorded.parameters = measured.parameters = {parameter("zeros", 1), parameter("little", 1), parameter("much", 1),
                                               parameter("lost", 1),  parameter("type", 1),   parameter("wide", 1)};
  recorded.rules = {{"wide", 0.5, std::nullopt, std::nullopt}};
  measured.parameters[0].numbers.zeros = 3;
  measured.parameters[1].numbers.norm = 1.001;
  measured.parameters[2].numbers.norm = 1.5;
  measured.parameters[3].numbers.elements = 3;
  measured.parameters[4].dtype = DType::float16;
  measured.parameters[5].numbers.norm = 2.0;
  EXPECT_THAT(
      kinds(check(recorded, measured).findings),
      ElementsAre("dtype type", "differs lost", "differs much", "differs little", "differs wide", "differs zeros"));
}

}  // namespace
}  // namespace gradclip
