#include "gradclip/report/text.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <limits>
#include <sstream>

#include "gradclip/report/text_table.hpp"
#include "small_model.hpp"

namespace gradclip {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

Report small_report(const std::string& command = "clip", ClipResult result = small_result(),
                    const Manifest& manifest = small_manifest(), std::optional<std::string> output = "out") {
  ReportRun run;
  run.device = "cpu";
  run.device_reason = "asked for";
  run.communicator = "single";
  run.numerics = "exact";
  run.seconds_total = 2.0;
  return clip_report(command, "in", manifest, TrainingStep{}, ClipOptions{}, result, output, run);
}

std::string summary(const Report& report, const TextStyle& style = {}) {
  std::ostringstream out;
  write_summary(report, style, out);
  return out.str();
}

std::string table(const Report& report, const TableOptions& options = {}, const TextStyle& style = {}) {
  std::ostringstream out;
  write_norms(report, options, style, out);
  return out.str();
}

TEST(Summary, OfACleanRunFitsAScreenAndBeginsWithTheTotal) {
  const std::string text = summary(small_report());
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 25);
  EXPECT_THAT(text,
              HasSubstr("gradclip clip in\nstep 7, 4 ranks, 5 parameters, 27 elements, 112 B of gradients\n\n"
                        "total norm    13                      p = 2\n"
                        "recorded      13                      logged by the training step; relative distance 0\n"));
  EXPECT_THAT(text, HasSubstr("ranks saw     13                      4 ranks with one total, exact arithmetic\n"));
  EXPECT_THAT(text, HasSubstr("max norm 6.5: clipped\n"));
  EXPECT_THAT(text, HasSubstr("total after   6.5                     measured on what was written\n"));
  EXPECT_THAT(text, HasSubstr("scale         all gradients / 4\n"));
  EXPECT_THAT(text, HasSubstr("non-finite    none\nfindings      none\n"));
  EXPECT_THAT(text, HasSubstr("output        out\n"));
  EXPECT_THAT(text, HasSubstr("device        cpu: asked for\n"));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

TEST(Summary, ShowsTheDevicesMemoryWhereThereIsSome) {
  Report report = small_report();
  report.run->memory_peak_bytes = 2'000'000;
  report.run->memory_budget_bytes = 4'000'000'000;
  EXPECT_THAT(summary(report), HasSubstr("memory        2.00 MB at most, budget 4.00 GB a process\n"));
  report.run->device_memory_peak_bytes = 3'000'000'000;
  report.run->device_memory_budget_bytes = 70'000'000'000;
  report.run->offload = "one model part at a time on the device";
  const std::string text = summary(report);
  EXPECT_THAT(text, HasSubstr("4.00 GB a process; on the device 3.00 GB at most, budget 70.0 GB\n"
                              "offload       one model part at a time on the device\n"));
}

TEST(Summary, PlacesNonFiniteValues) {
  ClipResult result = small_result();
  TensorStatistics& statistics = result.norm->parameters[2].statistics;
  statistics.nan = 2;
  statistics.neginf = 1;
  statistics.first_nonfinite = 3;
  statistics.first_nonfinite_rank = 2;
  add(result.norm->statistics, statistics, result.order);
  result.norm->findings.push_back(
      {.kind = "nonfinite", .parameter = "up", .ranks = {2}, .index = {}, .value = {}, .message = "2 NaN"});
  const std::string text = summary(small_report("clip", result));
  EXPECT_THAT(text, HasSubstr("non-finite    2 NaN, 1 -inf (13.04 % of all) in 1 parameter, first in each:\n"));
  EXPECT_THAT(text, HasSubstr("up [1, 1] rank 2 (2 NaN, 1 -inf)\n"));
  EXPECT_THAT(text, HasSubstr("findings      1, 1 of them above\n"));
}

TEST(Summary, SaysWhenNothingWasWritten) {
  ClipResult result = small_result();
  result.refused = true;
  result.clipped = false;
  result.total_after.reset();
  const std::string text = summary(small_report("clip", result, small_manifest(), std::nullopt));
  EXPECT_THAT(text, HasSubstr("nothing was written"));
  EXPECT_THAT(text, Not(HasSubstr("total after")));
  EXPECT_THAT(text, Not(HasSubstr("output  ")));
}

TEST(Summary, ShowsSeveralTotalsWithTheirRanks) {
  ClipResult result = small_result();
  result.norm->reference.totals = {{.total = 40.0, .ranks = {0, 1, 2}}, {.total = 4.0, .ranks = {3}}};
  result.coefficient.reset();
  result.coefficients = {0.25, 0.5};
  const std::string text = summary(small_report("clip", result));
  EXPECT_THAT(text, HasSubstr("ranks saw     40                      ranks 0-2, exact arithmetic, 208 % above the "
                              "total norm, coefficient 0.25\n"));
  EXPECT_THAT(
      text, HasSubstr("              4                       rank 3, 69.2 % below the total norm, coefficient 0.5\n"));
  EXPECT_THAT(text, HasSubstr("coefficient   several"));
}

TEST(Summary, FindingsAreCapped) {
  ClipResult result = small_result();
  result.norm->findings.assign(25, {.kind = "replicas-differ",
                                    .parameter = "norm",
                                    .ranks = {0, 1},
                                    .index = {{1}},
                                    .value = 0.5,
                                    .message = "they differ"});
  const std::string text = summary(small_report("clip", result));
  EXPECT_THAT(text, HasSubstr("findings      25\n  replicas-differ norm [1] (ranks 0, 1): they differ\n"));
  EXPECT_THAT(text, HasSubstr("... and 15 more: --report FILE.json has all\n"));
}

TEST(Summary, NamesCannotWriteToTheTerminal) {
  Manifest manifest = small_manifest();
  for (ParameterEntry& parameter : manifest.parameters) parameter.name = "x\x1b]0;title\x07\n\xC2\x9B\xE2\x80\xAE";
  ClipResult result = small_result();
  result.norm->parameters[0].statistics.nan = 1;
  result.norm->findings.push_back({.kind = "tied-differ",
                                   .parameter = manifest.parameters[0].name,
                                   .ranks = {},
                                   .index = {},
                                   .value = {},
                                   .message = "about x\x1b[2J"});
  const Report report = small_report("clip", result, manifest);
  for (const std::string& text : {summary(report), table(report)}) {
    EXPECT_THAT(text, Not(HasSubstr("\x1b")));
    EXPECT_THAT(text, Not(HasSubstr("\x07")));
    EXPECT_THAT(text, Not(HasSubstr("\xC2\x9B")));
    EXPECT_THAT(text, HasSubstr("x\\x1b]0;title\\x07\\x0a"));
  }
}

TEST(Summary, ColoursOnlyWhereAsked) {
  EXPECT_THAT(summary(small_report(), {.colour = true}), HasSubstr("\x1b[1m"));
}

TEST(Table, RowsInModelOrderWithATotal) {
  const std::string text = table(small_report("norms"));
  EXPECT_THAT(text, ContainsRegex("name +norm +share +max +mean +zeros +nan +inf\n"
                                  "embed +3 +5.33 % +3 +0.375 +0 +0 +0\n"
                                  "norm +4 +9.47 % "));
  EXPECT_THAT(text, ContainsRegex("\ntotal +13 +100.00 % "));
}

TEST(Table, SortedAndCut) {
  ClipResult result = small_result();
  result.norm->parameters[1].norm = std::nan("");
  result.norm->parameters[1].statistics.nan = 3;
  const Report report = small_report("norms", result);
  EXPECT_THAT(table(report, {.order = ParameterOrder::norm, .top = 2}),
              ContainsRegex("inf\nnorm +nan .*\nup +12 .*\n... 2 of 5 parameters shown\n"));
  EXPECT_THAT(table(report, {.order = ParameterOrder::max, .top = 1}), ContainsRegex("inf\nup "));
  EXPECT_THAT(table(report, {.order = ParameterOrder::nan, .top = 1}), ContainsRegex("inf\nnorm "));
  EXPECT_THAT(table(report, {.order = ParameterOrder::name, .top = 2}), ContainsRegex("inf\nbias .*\nembed .*\n..."));
}

TEST(Table, FitsTheTerminal) {
  Manifest manifest = small_manifest();
  manifest.parameters[0].name = "model.layers.0.self_attention.query_projection_with_a_long_name.weight";
  std::istringstream lines(table(small_report("norms", small_result(), manifest), {}, {.width = 80}));
  bool seen = false;
  for (std::string row; std::getline(lines, row) && row.find("total") == std::string::npos;) {
    if (row.find("...") == std::string::npos) continue;
    seen = true;
    EXPECT_EQ(columns(row), 80u) << row;
    EXPECT_THAT(row, testing::StartsWith("model."));
  }
  EXPECT_TRUE(seen);
}

/// Cells between runs of spaces.
std::vector<std::string> words(const std::string& row) {
  std::istringstream text(row);
  return {std::istream_iterator<std::string>(text), {}};
}

TEST(Table, TheWidestNumbersStayApart) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();
  Report report = small_report("norms");
  const auto fill = [&](ReportStatistics& statistics) {
    statistics.max_abs = kLargest;
    statistics.mean = -kLargest;
    statistics.zeros = statistics.nan = statistics.posinf = kAll;
    statistics.neginf = 0;
  };
  report.norm->total = kLargest;
  fill(*report.norm->statistics);
  report.parameters[0].norm = kLargest;
  report.parameters[0].share = 1.0;
  fill(*report.parameters[0].statistics);
  std::istringstream lines(table(report));
  std::size_t seen = 0;
  for (std::string row; std::getline(lines, row);) {
    if (!row.starts_with("embed") && !row.starts_with("total ")) continue;
    if (row.starts_with("total norm")) continue;
    ++seen;
    EXPECT_EQ(words(row).size(), 9u) << row;  // the share is two: "100.00 %"
    EXPECT_THAT(row, HasSubstr(" 1.79769e+308 "));
    EXPECT_THAT(row, HasSubstr(" -1.7977e+308 "));
    EXPECT_THAT(row, HasSubstr(" 18,446,744,073,709,551,615 "));
  }
  EXPECT_EQ(seen, 2u);

  Report difference = small_report("diff");
  ReportDiff& diff = difference.diff.emplace();
  ReportDifference& parameter = diff.parameters.emplace_back();
  parameter.name = "embed";
  parameter.status = "differs";
  parameter.elements = parameter.different = kAll;
  parameter.max_abs = parameter.max_rel = ReportExtreme{kLargest, {}};
  parameter.relative_l2 = parameter.relative_l2_epsilons = kLargest;
  parameter.cosine = -1.234567e-300;
  parameter.norm_ratio = kLargest;
  std::ostringstream out;
  write_differences(difference, {}, out);
  EXPECT_THAT(out.str(), ContainsRegex("\nembed +18,446,744,073,709,551,615 of 18,446,744,073,709,551,615 +1.798e.308 "
                                       "+1.798e.308 +1.798e.308 +1.798e.308 +-1.234567e-300 +1.797693e.308\n"));
}

TEST(Table, ANarrowScreenLeavesColumnsOut) {
  TextTable table;
  table.column("name", TextTable::Kind::text);
  table.column("count", TextTable::Kind::number, 20);
  table.column("more", TextTable::Kind::number, 10, true);
  table.column("most", TextTable::Kind::number, 10, true);
  table.row({std::string(4000, 'x'), "1", "2", "3"});
  const auto lines = [&](std::size_t width) {
    std::ostringstream out;
    table.write(out, {.width = width});
    EXPECT_EQ(table.left_out({.width = width}), width == 0    ? ""
                                                : width >= 66 ? ""
                                                : width >= 56 ? "most"
                                                              : "more, most");
    std::vector<std::string> result;
    std::istringstream text(out.str());
    for (std::string row; std::getline(text, row);) result.push_back(row);
    return result;
  };
  for (const std::size_t width : {40, 56, 66, 80, 200}) {
    for (const std::string& row : lines(width)) EXPECT_EQ(columns(row), width);
  }
  EXPECT_EQ(columns(lines(0)[1]), kWidestName + 40);
}

TEST(Table, NoLongNamePadsEveryRow) {
  Manifest manifest = small_manifest();
  manifest.parameters[2].name = std::string(4000, 'n') + "2";
  manifest.parameters[1].name = std::string(4000, 'n') + "1";
  Report report = small_report("norms", small_result(), manifest);
  ReportDiff& diff = report.diff.emplace();
  for (const ParameterEntry& entry : manifest.parameters) {
    ReportDifference& parameter = diff.parameters.emplace_back();
    parameter.name = entry.name;
    parameter.status = "differs";
    parameter.elements = 8;
    parameter.different = 1;
  }
  Report inspected = inspect_report("in", manifest);
  for (ReportGroup& group : inspected.groups) group.mesh = std::string(4000, 'm');
  for (const std::size_t width : {std::size_t{0}, std::size_t{80}, std::size_t{120}}) {
    const TextStyle style{.width = width};
    std::ostringstream all;
    write_norms(report, {}, style, all);
    write_summary(report, style, all);
    std::ostringstream of_diff;
    write_differences(report, style, of_diff);
    const std::string diff_text = of_diff.str();
    all << diff_text.substr(diff_text.find("\nname "));
    write_contents(inspected, style, all);
    std::istringstream lines(all.str());
    for (std::string row; std::getline(lines, row);) {
      // Lines of words are as long as they are.
      if (row.find("nnn") == std::string::npos && row.find("mmm") == std::string::npos) continue;
      EXPECT_LE(columns(row), width == 0 ? 220u : width) << row;
    }
  }
}

TEST(Table, NothingMeasuredHasNoMean) {
  ClipResult result = small_result();
  result.norm->parameters[1].statistics = TensorStatistics{};
  result.norm->parameters[1].norm = 0.0;
  result.norm->parameters[1].none = 2;
  const Report report = small_report("norms", result);
  EXPECT_THAT(table(report), ContainsRegex("\nnorm +0 +[0-9.]+ % +0 +- +0 +0 +0\n"));
  const std::string none = "none          1 parameter has no gradient on any rank: norm\n";
  EXPECT_THAT(table(report), HasSubstr(none));
  EXPECT_THAT(summary(report), HasSubstr(none));
  EXPECT_THAT(table(small_report()), Not(HasSubstr("no gradient on any rank")));

  Report by_rank = report;
  by_rank.view = view_of(ViewBy::rank, {}, small_manifest(), TrainingStep{}, *result.norm);
  const std::string text = table(by_rank, {.by = ViewBy::rank});
  EXPECT_THAT(text, ContainsRegex("\n3 +0 +0.00 % +0 +- +0 +0 +0\n"));
  EXPECT_THAT(text, HasSubstr("copies count on one rank only"));
  EXPECT_THAT(table(report), Not(HasSubstr("copies count on one rank only")));
}

TEST(Table, ManyWithoutAGradientAreCounted) {
  Manifest manifest = small_manifest();
  ClipResult result = small_result();
  for (std::size_t i = 5; i < 12; ++i) {
    ParameterEntry entry = manifest.parameters[1];
    entry.name = fmt::format("unused.{}", i);
    manifest.parameters.push_back(entry);
    ParameterNorm norm;
    norm.none = 2;
    result.norm->parameters.push_back(norm);
    result.scale.factors.expert.push_back(false);
  }
  EXPECT_THAT(
      summary(small_report("clip", result, manifest)),
      HasSubstr("none          7 parameters have no gradient on any rank: unused.5, unused.6, unused.7, unused.8, "
                "unused.9, and 2 more\n"));
}

TEST(Differences, ANanComesFirst) {
  Report report = small_report("diff");
  ReportDiff& diff = report.diff.emplace();
  for (const char* name : {"far", "broken"}) {
    ReportDifference& parameter = diff.parameters.emplace_back();
    parameter.name = name;
    parameter.status = "differs";
    parameter.elements = 8;
    parameter.different = 5;
    parameter.relative_l2 = 1.0;
  }
  diff.parameters[1].nan_different = 3;
  diff.parameters[1].relative_l2 = 0.0;
  std::ostringstream out;
  write_differences(report, {}, out);
  EXPECT_THAT(out.str(), ContainsRegex("\nbroken +3 NaN, 5 of 8 .*\nfar +5 of 8 "));
  EXPECT_THAT(out.str(), HasSubstr("finite on both sides"));
}

TEST(Contents, ListsMeshesGroupsStagesTypes) {
  std::ostringstream out;
  write_contents(inspect_report("in", small_manifest()), {}, out);
  const std::string text = out.str();
  EXPECT_THAT(text, ContainsRegex("world +pp 2 x dp 2 +0-3 +device mesh\n"));
  EXPECT_THAT(text, ContainsRegex("stage1 +Shard\\(0\\) +2 +12 +40 B\n"));
  EXPECT_THAT(text, ContainsRegex("\\(plain tensors\\) +1 +4 +16 B\n"));
  EXPECT_THAT(text, ContainsRegex("  1 +0, 1 +3 +16 +56 B\n"));
  EXPECT_THAT(text, ContainsRegex("bfloat16 +1 +4 +8 B\n"));
  EXPECT_THAT(text, ContainsRegex("bias +distinct +2\n"));
}

TEST(Pieces, Sizes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1000), "1.00 kB");
  EXPECT_EQ(human_bytes(1234567), "1.23 MB");
  EXPECT_EQ(human_bytes(99.96e6), "100 MB");
  EXPECT_EQ(human_bytes(999.7e6), "1.00 GB");
  EXPECT_EQ(human_bytes(4.2e10), "42.0 GB");
}

TEST(Pieces, Seconds) {
  EXPECT_EQ(human_seconds(0), "0 s");
  EXPECT_EQ(human_seconds(0.00003), "0.03 ms");
  EXPECT_EQ(human_seconds(0.0123), "12 ms");
  EXPECT_EQ(human_seconds(0.123), "0.12 s");
  EXPECT_EQ(human_seconds(1.234), "1.23 s");
  EXPECT_EQ(human_seconds(12.34), "12.3 s");
  EXPECT_EQ(human_seconds(125), "2 min 5 s");
  EXPECT_EQ(human_seconds(7260), "2 h 1 min");
}

TEST(Pieces, Digits) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(grouped(1234567), "1,234,567");
}

TEST(Pieces, RankLists) {
  const auto list = [](std::vector<std::int32_t> ranks, std::size_t runs = 8) { return rank_list(ranks, runs); };
  EXPECT_EQ(list({}), "");
  EXPECT_EQ(list({3}), "3");
  EXPECT_EQ(list({0, 1}), "0, 1");
  EXPECT_EQ(list({0, 1, 2, 3, 8, 10, 11, 12}), "0-3, 8, 10-12");
  EXPECT_EQ(list({0, 2, 4, 6}, 2), "0, 2, ..., 4 in all");
}

TEST(Pieces, ShortenedInTheMiddleBetweenCharacters) {
  EXPECT_EQ(shortened("model.weight", 12), "model.weight");
  EXPECT_EQ(shortened("model.weight", 9), "mod...ght");
  EXPECT_EQ(shortened("model.weight", 10), "mode...ght");
  EXPECT_EQ(shortened("\xC3\xA4\xC3\xB6\xC3\xBC\xC3\xA4\xC3\xB6\xC3\xBC", 5), "\xC3\xA4...\xC3\xBC");
  EXPECT_EQ(columns("\xC3\xA4\xE2\x82\xAC."), 3u);
}

}  // namespace
}  // namespace gradclip
