#include "gradclip/report/html.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cmath>
#include <limits>
#include <numeric>
#include <regex>
#include <sstream>
#include <streambuf>
#include <system_error>

#include "gradclip/base/error.hpp"
#include "gradclip/report/html_axes.hpp"
#include "gradclip/report/html_charts.hpp"
#include "gradclip/report/html_data.hpp"
#include "gradclip/report/html_figures.hpp"
#include "gradclip/report/html_layers.hpp"
#include "gradclip/report/html_markup.hpp"
#include "gradclip/report/html_table.hpp"
#include "gradclip/report/structured.hpp"
#include "gradclip/report/text.hpp"
#include "small_model.hpp"

namespace gradclip {
namespace {

using testing::ContainsRegex;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::Eq;
using testing::HasSubstr;
using testing::Not;
using testing::Optional;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class Write>
std::string written(const Write& write) {
  std::ostringstream out;
  Markup html(out);
  write(html);
  EXPECT_TRUE(html.balanced());
  return out.str();
}

/// An attribute of every rectangle of a class, in order.
std::vector<double> lengths(const std::string& svg, const std::string& style, const std::string& attribute) {
  std::vector<double> result;
  const std::regex pattern("<rect class=\"" + style + "\"[^>]* " + attribute + "=\"([-0-9.]+)\"");
  for (std::sregex_iterator found(svg.begin(), svg.end(), pattern), end; found != end; ++found) {
    result.push_back(std::stod((*found)[1]));
  }
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Markup
// ---------------------------------------------------------------------------------------------------------------------

TEST(HtmlText, IsNoMarkupAnywhere) {
  EXPECT_EQ(html_text("a<b>&\"'"), "a&lt;b&gt;&amp;&quot;&#39;");
  EXPECT_EQ(html_text("line\nline"), "line&#10;line") << "tooltips have several";
  EXPECT_EQ(html_text(std::string_view("\0\x07\x1b[", 4)), "\\x00\\x07\\x1b[");
  EXPECT_EQ(html_text("a\u202Eb\u2066"), "a\\xe2\\x80\\xaeb\\xe2\\x81\\xa6");
  EXPECT_EQ(html_text("\xFF"), "\\xff");
  EXPECT_EQ(html_text("größe"), "größe");
}

TEST(ScriptText, IsAJsonStringThatEndsNoScript) {
  EXPECT_EQ(script_text("</script><!--&"), R"("\u003c/script\u003e\u003c!--\u0026")");
  EXPECT_EQ(script_text("a\"b\\"), R"("a\"b\\")");
  EXPECT_EQ(script_text("é\u2028"), "\"\\u00e9\\\\xe2\\\\x80\\\\xa8\"");
}

TEST(Markup, ClosesWhatItOpened) {
  const std::string text = written([](Markup& html) {
    const Tag outer(html, "g", {{"class", "a\"b"}, {"x", 1.5}, {"n", 3u}});
    html.element("text", {}, "<&>");
    html.empty("rect", {{"width", 2.0}});
  });
  EXPECT_EQ(text, "<g class=\"a&quot;b\" x=\"1.5\" n=\"3\"><text>&lt;&amp;&gt;</text><rect width=\"2\"/></g>");
}

TEST(Pixels, HaveOneDecimal) {
  EXPECT_EQ(pixels(12.0), "12");
  EXPECT_EQ(pixels(0.25), "0.2");
  EXPECT_EQ(pixels(-0.01), "0");
}

TEST(TableData, KeepsWhatAScriptsNumbersDoNotHold) {
  TableData table("things");
  table.column("name", TableData::Kind::name);
  table.column("count", TableData::Kind::count, "of <all>");
  table.row().cell("a").cell(std::uint64_t{1} << 53);
  table.row().cell("b").cell((std::uint64_t{1} << 53) + 1);
  table.row().cell("c").cell(std::optional<double>());
  table.row().cell("d").cell(kNan);
  const std::string text = written([&](Markup& html) { table.write(html); });
  EXPECT_THAT(text,
              HasSubstr("{\"columns\":[[\"name\",\"name\",\"\"],[\"count\",\"count\",\"of \\u003call\\u003e\"]],\n"
                        "\"rows\":[[\"a\",9007199254740992],\n[\"b\",\"9007199254740993\"],\n[\"c\",null],\n"
                        "[\"d\",\"nan\"]]}</script>"));
  EXPECT_THAT(written([](Markup& html) { TableData("things").write(html); }), HasSubstr("\"rows\":[]}"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Axes
// ---------------------------------------------------------------------------------------------------------------------

TEST(Axis, StandsOnZeroAndEndsOnARoundNumber) {
  const std::vector<double> numbers{0.3, 1.0, 2.2, kNan, kInfinity};
  const Axis axis = axis_for(numbers);
  EXPECT_FALSE(axis.logarithmic);
  EXPECT_EQ(axis.low, 0.0);
  EXPECT_EQ(axis.high, 2.5);
  EXPECT_THAT(axis.ticks(6), ElementsAre(0.0, 0.5, 1.0, 1.5, 2.0, 2.5));
  EXPECT_EQ(axis.place(1.25), 0.5);
  EXPECT_EQ(axis.place(99.0), 1.0);
}

TEST(Axis, IsLogarithmicWhereNumbersAreFarApart) {
  const std::vector<double> numbers{2e-3, 0.0, 40.0};
  const Axis axis = axis_for(numbers);
  EXPECT_TRUE(axis.logarithmic);
  EXPECT_EQ(axis.low, 1e-3);
  EXPECT_EQ(axis.high, 100.0);
  EXPECT_THAT(axis.ticks(6), ElementsAre(1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0));
  EXPECT_EQ(axis.place(0.0), 0.0);
  EXPECT_NEAR(axis.place(10.0), 0.8, 1e-12);
}

TEST(Axis, HoldsEveryFloat64) {
  for (const std::vector<double>& numbers :
       {std::vector<double>{}, {0.0}, {-1.0}, {kNan}, {5e-324}, {5e-324, 1e308}, {1.7e308}, {1e308, 1.7e308}}) {
    const Axis axis = axis_for(numbers);
    EXPECT_LT(axis.low, axis.high);
    EXPECT_TRUE(std::isfinite(axis.high));
    EXPECT_LE(axis.ticks(6).size(), 13u);
    for (const double number : numbers) {
      if (std::isnan(number)) continue;
      EXPECT_GE(axis.place(number), 0.0);
      EXPECT_LE(axis.place(number), 1.0);
    }
  }
}

TEST(ColourScale, DividesWhatIsFinite) {
  const std::vector<double> numbers{0.0, 7.0, kNan};
  const ColourScale scale(numbers);
  EXPECT_THAT(scale.class_of(0.0), Optional(Eq(0u)));
  EXPECT_THAT(scale.class_of(3.5), Optional(Eq(3u)));
  EXPECT_THAT(scale.class_of(7.0), Optional(Eq(6u)));
  EXPECT_EQ(scale.class_of(kNan), std::nullopt);
  const std::vector<double> far{1e-6, 1.0};
  EXPECT_TRUE(ColourScale(far).logarithmic());
  EXPECT_THAT(ColourScale(far).class_of(1e-3), Optional(Eq(3u)));
  const std::vector<double> extremes{-1.7e308, 1.7e308};
  EXPECT_THAT(ColourScale(extremes).class_of(1.7e308), Optional(Eq(6u)));
  EXPECT_EQ(ColourScale({}).class_of(kNan), std::nullopt);
}

TEST(Numbers, AreShort) {
  EXPECT_EQ(short_number(1234567.0), "1.235e6");
  EXPECT_EQ(short_number(1.5e-9), "1.5e-9");
  EXPECT_EQ(short_number(1e100), "1e100");
  EXPECT_EQ(short_number(kNan), "nan");
  EXPECT_EQ(count_number(1234567.0), "1,234,567");
  EXPECT_EQ(percentage(0.123), "12.30 %");
  EXPECT_EQ(percentage(0.0), "0 %");
  EXPECT_EQ(percentage(1.4e-7), "1.4e-5 %");
  EXPECT_EQ(power_text(-14), "2⁻¹⁴");
}

// ---------------------------------------------------------------------------------------------------------------------
// Layers
// ---------------------------------------------------------------------------------------------------------------------

TEST(LayerOf, EndsWithTheFirstNumber) {
  EXPECT_EQ(layer_of("model.layers.3.mlp.experts.7.up.weight"), "model.layers.3");
  EXPECT_EQ(layer_of("model.embed_tokens.weight"), "model.embed_tokens");
  EXPECT_EQ(layer_of("0.weight"), "0");
  EXPECT_EQ(layer_of("bias"), "bias");
  EXPECT_EQ(layer_of("blocks.5"), "blocks") << "the last part is the parameter's own";
  EXPECT_EQ(layer_of(""), "");
}

TEST(AtMost, PutsNeighboursTogether) {
  std::vector<Layer> layers;
  for (std::size_t i = 0; i < 10; ++i) layers.push_back({"l." + std::to_string(i), {i}, 1});
  const std::vector<Layer> few = at_most(layers, 4);
  ASSERT_EQ(few.size(), 4u);
  EXPECT_EQ(few[0].name, "l.0 to l.2");
  EXPECT_THAT(few[1].parameters, ElementsAre(3u, 4u, 5u));
  EXPECT_EQ(few[3].name, "l.9");
  EXPECT_EQ(at_most(layers, 10).size(), 10u);
}

PageParameter parameter(std::string name, double norm, double share) {
  PageParameter made;
  made.name = std::move(name);
  made.elements = 4;
  made.norm = norm;
  made.share = share;
  made.zeros = 1;
  return made;
}

TEST(SumOf, AddsPowers) {
  PageReport report;
  report.norm_type = 2.0;
  report.parameters = {parameter("a", 3e200, 0.36), parameter("b", 4e200, 0.64), parameter("b2", 9.0, 0.0)};
  report.parameters[2].counted = false;
  const std::vector<std::size_t> all{0, 1, 2};
  const LayerSum sum = sum_of(report, all);
  EXPECT_EQ(sum.parameters, 2u) << "a tied weight's later entry adds nothing";
  EXPECT_THAT(sum.norm, Optional(DoubleNear(5e200, 1e186)));
  EXPECT_THAT(sum.share, Optional(DoubleNear(1.0, 1e-15)));
  EXPECT_THAT(sum.zeros, Optional(Eq(0.25)));
  report.norm_type = 1.0;
  EXPECT_THAT(sum_of(report, all).norm, Optional(DoubleNear(7e200, 1e186)));
  report.norm_type = kInfinity;
  EXPECT_THAT(sum_of(report, all).norm, Optional(Eq(4e200)));
  report.parameters[0].norm = kNan;
  EXPECT_TRUE(std::isnan(*sum_of(report, all).norm));
}

TEST(ModuleTree, PutsSingleChildrenTogether) {
  std::vector<PageParameter> parameters{parameter("m.layers.0.up.weight", 1, 0),
                                        parameter("m.layers.1.up.weight", 1, 0),
                                        parameter("m.layers.0.down.weight", 1, 0)};
  const ModuleNode tree = module_tree(parameters, 10);
  ASSERT_EQ(tree.children.size(), 1u);
  const ModuleNode& layers = tree.children[0];
  EXPECT_EQ(layers.label, "m.layers");
  ASSERT_EQ(layers.children.size(), 2u);
  EXPECT_THAT(layers.children[0].parameters, ElementsAre(0u, 2u)) << "not neighbours in model order";
  EXPECT_EQ(layers.children[1].label, "1.up.weight");
  EXPECT_EQ(layers.children[1].name, "m.layers.1.up.weight");
}

TEST(ModuleTree, EndsAtItsDepth) {
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += "a.";
  const ModuleNode tree = module_tree(
      {parameter(deep + "x", 1, 0), parameter(deep + "y", 1, 0), parameter("", 1, 0), parameter("..", 1, 0)}, 10);
  std::size_t depth = 0;
  for (const ModuleNode* node = &tree; !node->children.empty(); node = &node->children[0]) ++depth;
  EXPECT_LE(depth, 10u);
}

// ---------------------------------------------------------------------------------------------------------------------
// Charts
// ---------------------------------------------------------------------------------------------------------------------

TEST(BarChart, HasHeightsInProportion) {
  BarChart chart;
  chart.bars = {{{"a", ""}, 1.0, "a"}, {{"b", "b."}, 2.0, "b"}, {{"c", ""}, 4.0, "c"}, {{"d", ""}, std::nullopt, "d"}};
  const std::string svg = written([&](Markup& html) { write_bar_chart(html, chart); });
  const std::vector<double> heights = lengths(svg, "bar", "height");
  ASSERT_EQ(heights.size(), 3u) << "nothing for what was not measured";
  EXPECT_NEAR(heights[1], 2 * heights[0], 0.11);
  EXPECT_NEAR(heights[2], 4 * heights[0], 0.21);
  const std::vector<double> y = lengths(svg, "bar", "y");
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(y[i] + heights[i], 250, 0.11) << "all stand on the axis";
  EXPECT_THAT(svg, HasSubstr("data-find=\"b.\""));
}

TEST(BarChart, DrawsWhatIsNotFiniteOverTheWholeHeight) {
  BarChart chart;
  chart.bars = {{{"a", ""}, 1.0, "a"}, {{"b", ""}, kNan, "b"}, {{"c", ""}, kInfinity, "c"}};
  const std::string svg = written([&](Markup& html) { write_bar_chart(html, chart); });
  EXPECT_EQ(lengths(svg, "bar alarm", "height"), lengths(svg, "bar", "height").size() == 1
                                                     ? std::vector<double>(2, lengths(svg, "reach", "height")[0])
                                                     : std::vector<double>());
}

TEST(Icicle, WidthsOfALevelAddUp) {
  Icicle icicle;
  icicle.root = {
      "all", "",   "all",
      8.0,   "d3", {{"a", "a.", "a", 5.0, "d3", {{"x", "", "x", 5.0, "d3", {}}}}, {"b", "b.", "b", 2.0, "d4", {}}}};
  for (int i = 0; i < 500; ++i) icicle.root.children.push_back({"s", "", "s", 1.0 / 500, "d3", {}});
  const std::string svg = written([&](Markup& html) { write_icicle(html, icicle); });
  const std::vector<double> widths = lengths(svg, "node", "width");
  ASSERT_EQ(widths.size(), 4u) << "the small ones are one mark";
  EXPECT_THAT(widths, ElementsAre(1080.0, 675.0, 675.0, 270.0));
  EXPECT_THAT(lengths(svg, "mark node narrow", "width"), ElementsAre(DoubleNear(135.0, 0.11)));
  EXPECT_THAT(svg, HasSubstr("500 small modules in all"));
  EXPECT_THAT(lengths(svg, "mark node narrow", "x"), ElementsAre(DoubleNear(945.0, 0.11)));
}

TEST(HeatMap, ColoursEachRowByItself) {
  HeatMap map;
  map.columns = {{"a", ""}, {"b", ""}};
  map.rows = {{"small", {1e-9, 2e-9}, {"t", "t"}, "", "", false},
              {"large", {5.0, std::nullopt}, {"t", "t"}, "", "", false},
              {"bad", {0.0, 0.5}, {"t", "t"}, "", "", true}};
  const std::string svg = written([&](Markup& html) { write_heat_map(html, map); });
  const auto cells = [&](const std::string& style) { return lengths(svg, "mark cell " + style, "x").size(); };
  EXPECT_EQ(cells("s0"), 2u) << "the smallest of its row; what is no alarm";
  EXPECT_EQ(cells("s6"), 1u);
  EXPECT_EQ(cells("s3"), 1u) << "alone in its row";
  EXPECT_EQ(cells("none"), 1u);
  EXPECT_EQ(cells("alarm"), 1u);
}

TEST(RankGrid, PlacesTheLastDimensionFromLeftToRight) {
  RankGrid grid;
  grid.dim_names = {"pp", "dp", "tp"};
  grid.shape = {2, 2, 3};
  for (int i = 0; i < 12; ++i) grid.cells.push_back({std::to_string(i), "t", "s0", i == 5});
  const std::string svg = written([&](Markup& html) { write_rank_grid(html, grid); });
  const std::vector<double> x = lengths(svg, "rank", "x"), y = lengths(svg, "rank", "y");
  ASSERT_EQ(x.size(), 12u);
  EXPECT_LT(x[0], x[1]);
  EXPECT_EQ(x[0], x[3]);
  EXPECT_EQ(y[0], y[2]);
  EXPECT_LT(y[2], y[3]);
  EXPECT_GT(y[6] - y[3], y[3] - y[0]) << "blocks stand apart";
  EXPECT_THAT(svg, HasSubstr("mark s0 found"));
}

TEST(ExponentChart, ShowsASingleElementToo) {
  ExponentChart chart;
  chart.first = -3;
  chart.counts = {1, 0, 1000};
  chart.ranges = {{"float16", -24, -14, 15}};
  const std::string svg = written([&](Markup& html) { write_exponent_chart(html, chart); });
  const std::vector<double> heights = lengths(svg, "bar", "height");
  ASSERT_EQ(heights.size(), 3u);
  EXPECT_EQ(heights[0], 2.0);
  EXPECT_EQ(heights[1], 0.0);
  EXPECT_EQ(heights[2], lengths(svg, "reach", "height")[0]) << "1000 is the axis's end";
  EXPECT_THAT(svg, HasSubstr("2⁻³ ≤ |g| &lt; 2⁻²"));
}

// ---------------------------------------------------------------------------------------------------------------------
// The page
// ---------------------------------------------------------------------------------------------------------------------

Report small_report() {
  return clip_report("clip", "in", small_manifest(), TrainingStep{}, ClipOptions{}, small_result(), "out", ReportRun{});
}

TEST(Html, IsThePageOfTheJson) {
  std::ostringstream json, of_json, of_report;
  write_json(small_report(), json);
  write_html(json.str(), "file", of_json);
  write_html(small_report(), of_report);
  EXPECT_EQ(of_json.str(), of_report.str());
  EXPECT_THAT(of_report.str(), HasSubstr("default-src &#39;none&#39;"));
  EXPECT_THAT(of_report.str(), HasSubstr("Who holds what of stage0 [Shard(0)]"));
}

/// Takes some characters, then its disk is full.
class FullDisk : public std::streambuf {
 public:
  explicit FullDisk(std::size_t room) : room_(room) {}

 private:
  int_type overflow(int_type character) override {
    take(1);
    return character;
  }
  std::streamsize xsputn(const char*, std::streamsize size) override {
    take(static_cast<std::size_t>(size));
    return size;
  }
  void take(std::size_t size) {
    if (size > room_) throw std::system_error(ENOSPC, std::generic_category());
    room_ -= size;
  }

  std::size_t room_;
};

TEST(Structured, AFullDiskIsAnErrorOfEveryFormat) {
  for (const ReportFormat format : {ReportFormat::json, ReportFormat::csv, ReportFormat::junit, ReportFormat::html}) {
    for (const std::size_t room : {0, 100, 300}) {
      FullDisk disk(room);
      std::ostream out(&disk);
      out.exceptions(std::ios::badbit);
      EXPECT_THROW(write(small_report(), format, out), std::system_error) << static_cast<int>(format);
    }
  }
}

TEST(Html, CastsHaveThePercentagesOfTheText) {
  Report report =
      clip_report("norms", "in", small_manifest(), TrainingStep{}, ClipOptions{}, small_result(), {}, ReportRun{});
  ExponentHistogram& histogram = report.norm->histogram.emplace();
  histogram.zeros = 900;
  histogram.nan = 40;
  histogram.posinf = 20;
  histogram.first = -30;
  histogram.counts = {25, 0, 15};
  const std::string texts[] = {"12.50 %", "25.00 %", "37.50 %", "50.00 %"};  // of the 40 that are finite and not 0
  for (std::size_t i = 0; i < kCastTypes.size(); ++i) histogram.casts[i] = {5 * (i + 1), 0, 0};
  const std::string kNone = "<td class=\"n\">0</td>";
  std::ostringstream text, page;
  write_norms(report, {}, {}, text);
  write_html(report, page);
  for (std::size_t i = 0; i < kCastTypes.size(); ++i) {
    EXPECT_THAT(text.str(),
                ContainsRegex(fmt::format("\n{} +{} +{} +0 +0.00 %", name(kCastTypes[i]), 5 * (i + 1), texts[i])));
    EXPECT_THAT(page.str(), HasSubstr(fmt::format("<th scope=\"row\">{}</th>{}<td class=\"n\">{} ({})</td>",
                                                  name(kCastTypes[i]), kNone + kNone, 5 * (i + 1), texts[i])));
  }
}

Report checked_report(const Baseline* recorded) {
  const ClipResult result = small_result();
  CheckResult check =
      check_against(recorded, baseline_of(small_manifest(), *result.norm, {2.0, "exact", 4.0, std::nullopt}),
                    result.norm->findings, {});
  return check_report("in", small_manifest(), TrainingStep{}, ClipOptions{}, result, std::move(check), ReportRun{});
}

std::string page_of(const Report& report) {
  std::ostringstream page;
  write_html(report, page);
  return page.str();
}

TEST(Html, WhatWasNotComparedPassesNothing) {
  EXPECT_THAT(page_of(checked_report(nullptr)),
              HasSubstr("<p class=\"verdict bad\">No-baseline, not compared with a baseline</p>"));
  Baseline recorded = baseline_of(small_manifest(), *small_result().norm, {1.0, "exact", 4.0, std::nullopt});
  EXPECT_THAT(page_of(checked_report(&recorded)),
              HasSubstr("<p class=\"verdict bad\">Conditions-differ, not compared with a baseline</p>"));
  recorded.conditions.norm_type = 2.0;
  EXPECT_THAT(page_of(checked_report(&recorded)),
              HasSubstr("<p class=\"verdict good\">Passed, 58 of 58 items pass</p>"));
}

/// Two layers that are equal but for what `spoil` does to the second.
template <class Spoil>
PageReport compared(const Spoil& spoil) {
  PageReport page;
  page.command = "diff";
  page.other.emplace();
  for (const char* name : {"layers.0.w", "layers.1.w"}) {
    PageDifference& parameter = page.differences.emplace_back();
    parameter.name = name;
    parameter.status = "equal";
    parameter.elements = 8;
    parameter.max_abs = parameter.max_rel = parameter.relative_l2 = parameter.relative_l2_epsilons = 0.0;
    parameter.cosine = parameter.norm_ratio = 1.0;
  }
  spoil(page.differences[1]);
  return page;
}

TEST(Html, ANanThatMeetsANumberIsNoPerfectError) {
  const auto drawn = [](const PageReport& page) {
    return written([&](Markup& html) {
      write_difference_norms(html, page);
      write_difference_statistics(html, page);
    });
  };
  const std::string equal = drawn(compared([](PageDifference&) {}));
  EXPECT_THAT(equal, HasSubstr("layers.1&#10;1 − cosine: 0"));
  EXPECT_THAT(equal, Not(HasSubstr(": nan")));
  const double kinds[] = {kNan, kInfinity};
  for (const double largest : kinds) {
    const std::string text = drawn(compared([&](PageDifference& parameter) {
      parameter.status = "differs";
      parameter.different = 1;
      parameter.nan_different = std::isnan(largest) ? 1 : 0;
      parameter.max_abs = parameter.max_rel = largest;
    }));
    for (const char* what : {"relative L2 error", "1 − cosine", "|‖A‖ / ‖B‖ − 1|"}) {
      EXPECT_THAT(text, HasSubstr(fmt::format("layers.0&#10;{}: 0\"", what)));
      EXPECT_THAT(text, HasSubstr(fmt::format("layers.1&#10;{}: nan\"", what)));
    }
    EXPECT_THAT(text, HasSubstr("relative L2 error up to nan (nan epsilons)"));
    EXPECT_THAT(text, Not(HasSubstr("layers.1&#10;relative L2 error: 0")));
  }
}

TEST(Html, FactsHaveNoPage) {
  for (const char* command : {"doctor", "synth"}) {
    std::ostringstream json, page;
    write_json(FactSheet{command, {{"versions", {{"gradclip", "1"}}}}}, json);
    try {
      write_html(json.str(), "file", page);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::string("reports of ") + command + " have no page"));
    }
    EXPECT_EQ(page.str(), "");
  }
}

TEST(Html, ReadsWhatTheReportSays) {
  std::ostringstream json;
  write_json(small_report(), json);
  const PageReport page = read_page_report(json.str(), "file");
  EXPECT_EQ(page.command, "clip");
  EXPECT_EQ(page.total, 13.0);
  EXPECT_EQ(page.total_after, 6.5);
  EXPECT_EQ(page.outcome, "clipped");
  ASSERT_EQ(page.parameters.size(), 5u);
  EXPECT_EQ(page.parameters[2].norm, 12.0);
  EXPECT_FALSE(page.parameters[3].counted);
  EXPECT_EQ(page.meshes.size(), 3u);
  EXPECT_TRUE(page.meshes[0].device_mesh);
  ASSERT_EQ(page.totals.size(), 1u);
  EXPECT_EQ(page.totals[0].ranks.size(), 4u);
}

TEST(Html, NamesFileAndKeyOfWhatIsWrong) {
  try {
    static_cast<void>(read_page_report(R"({"format":"gradclip.report","version":7})", "report 'x.json'"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::bad_input);
    EXPECT_STREQ(error.what(), "report 'x.json', version: is 7; expected 1; read it with the gradclip that wrote it");
  }
}

}  // namespace
}  // namespace gradclip
