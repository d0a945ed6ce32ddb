#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "gradclip/report/annotations.hpp"
#include "gradclip/report/structured.hpp"
#include "gradclip/report/text.hpp"
#include "small_model.hpp"

namespace gradclip {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

constexpr const char* kHostile = "::add-mask::<x>|%\n=1,2";

Baseline measured(const ClipResult& result, const Manifest& manifest) {
  return baseline_of(manifest, *result.norm, {2.0, "exact", 4.0, std::nullopt});
}

/// The small model, `up` three times as large as its baseline says, one parameter with a name that bites.
Report regressed(std::size_t failing = 1) {
  Manifest manifest = small_manifest();
  manifest.parameters[4].name = kHostile;
  const ClipResult result = small_result();
  Baseline recorded = measured(result, manifest);
  recorded.parameters[2].numbers.norm = 4.0;
  recorded.parameters[4].numbers.zeros = 0;
  if (failing > 5) {  // a parameter that is gone for each more
    for (std::size_t i = 5; i < failing; ++i) recorded.parameters.push_back(recorded.parameters[0]);
  }
  CheckResult check = check_against(&recorded, measured(result, manifest), result.norm->findings, {});
  check.path = "base.json";
  return check_report("in", manifest, TrainingStep{}, ClipOptions{}, result, std::move(check), ReportRun{});
}

template <class Write>
std::string written(const Write& write) {
  std::ostringstream out;
  write(out);
  return out.str();
}

TEST(CheckReport, OneLineSaysIt) {
  EXPECT_EQ(check_summary(regressed()),
            "gradclip check: regressed: 2 findings, 2 of 58 items in 2 of 5 parameters; worst: differs up: norm 12, "
            "baseline 4 (off by 8, 200 %, allowed 4e-06)");
}

TEST(CheckReport, Json) {
  const Report report = regressed();
  const auto json = nlohmann::ordered_json::parse(written([&](std::ostream& out) { write_json(report, out); }));
  EXPECT_EQ(json["outcome"], "regressed");
  EXPECT_EQ(json["baseline"]["rtol"], 1e-6);
  EXPECT_EQ(json["counts"]["items_failed"], 2);
  EXPECT_EQ(json["items"].size(), 58u);
  EXPECT_TRUE(json["items"][0]["parameter"].is_null());
  EXPECT_EQ(json["findings"].size(), 2u);
  EXPECT_EQ(json["norm"]["total"], 13.0);
  std::size_t failed = 0;
  for (const auto& item : json["items"]) {
    if (item["status"] != "failed") continue;
    ++failed;
    if (item["item"] == "norm") {
      EXPECT_EQ(item["parameter"], "up");
      EXPECT_EQ(item["expected"], 4.0);
      EXPECT_EQ(item["found"], 12.0);
      EXPECT_EQ(item["deviation"], 2.0);
    }
  }
  EXPECT_EQ(failed, 2u);
}

TEST(CheckReport, Csv) {
  const std::string csv = written([&](std::ostream& out) { write_csv(regressed(), out); });
  EXPECT_THAT(csv, StartsWith("parameter,item,status,expected,found,deviation,allowed\n,nonfinite,passed,0,0,,\n"));
  EXPECT_THAT(csv, HasSubstr("\nup,norm,failed,4.0,12.0,2.0,4e-06\n"));
  EXPECT_THAT(csv, HasSubstr("\nup,shape,passed,2x2,2x2,,\n"));
  EXPECT_THAT(csv, HasSubstr("\n\"::add-mask::<x>|%\n=1,2\",zeros,failed,0,4,inf,0.0\n"));
}

TEST(CheckReport, TextBeginsNoLineWithAName) {
  const std::string text = written([&](std::ostream& out) { write_check(regressed(), {}, out); });
  EXPECT_THAT(text, StartsWith("gradclip check: regressed: "));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_THAT(line.substr(std::min(line.find_first_not_of(' '), line.size())), Not(StartsWith("::"))) << text;
  }
}

TEST(JUnit, ACaseForEachParameter) {
  const std::string xml = written([&](std::ostream& out) { write_junit(regressed(), out); });
  EXPECT_THAT(xml, HasSubstr("tests=\"6\" failures=\"2\" errors=\"0\" skipped=\"0\""));
  EXPECT_THAT(xml, HasSubstr("<testcase classname=\"gradclip.check\" name=\"norm\"/>"));
  EXPECT_THAT(xml, HasSubstr("name=\"up\"><failure type=\"differs\" message=\"norm 12, baseline 4"));
  EXPECT_THAT(xml, HasSubstr("name=\"::add-mask::&lt;x&gt;|%&#10;=1,2\""));
  EXPECT_THAT(xml, EndsWith("</testsuites>\n"));
}

TEST(JUnit, WhatCannotBeComparedIsAnError) {
  Report report = regressed();
  report.check = check_against(nullptr, measured(small_result(), small_manifest()), {}, {});
  report.findings = report.check->findings;
  const std::string xml = written([&](std::ostream& out) { write_junit(report, out); });
  EXPECT_THAT(xml, HasSubstr("tests=\"7\" failures=\"0\" errors=\"1\" skipped=\"6\""));
  EXPECT_THAT(xml, HasSubstr("<error type=\"no-baseline\""));
}

TEST(JUnit, OtherCommandsHaveTheirFindings) {
  Report report = clip_report("norms", "in", small_manifest(), TrainingStep{}, ClipOptions{}, small_result(),
                              std::nullopt, ReportRun{});
  Finding finding;
  finding.kind = "replicas-differ";
  finding.parameter = "norm";
  finding.ranks = {0, 1};
  finding.index = std::vector<std::int64_t>{2};
  finding.message = "copies differ";
  report.findings.push_back(finding);
  finding = {};
  finding.kind = "ranks-disagree";
  finding.message = "two totals";
  report.findings.push_back(finding);
  const std::string xml = written([&](std::ostream& out) { write_junit(report, out); });
  EXPECT_THAT(xml, HasSubstr("tests=\"6\" failures=\"2\""));
  EXPECT_THAT(xml, HasSubstr("name=\"norm\"><failure type=\"replicas-differ\" message=\"copies differ\">"
                             "replicas-differ [2] (ranks 0, 1): copies differ&#10;</failure>"));
  EXPECT_THAT(xml, HasSubstr("classname=\"gradclip.norms.findings\" name=\"ranks-disagree\""));

  Report clean;
  clean.command = "verify";
  clean.verification.emplace();
  EXPECT_THAT(written([&](std::ostream& out) { write_junit(clean, out); }),
              HasSubstr("<testcase classname=\"gradclip.verify\" name=\"findings\"/>"));
}

std::size_t lines_of(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST(Annotations, TheWorstNineAndATotal) {
  const std::string few = written([&](std::ostream& out) { write_annotations(regressed(), out); });
  EXPECT_EQ(lines_of(few), 3u);
  EXPECT_THAT(few, StartsWith("::error title=gradclip check%3A differs::up: norm 12, baseline 4"));
  EXPECT_THAT(few, HasSubstr("::error title=gradclip check%3A differs::::add-mask::<x>|%25%0A=1,2: zeros 4"));
  EXPECT_THAT(few, HasSubstr("\n::error title=gradclip check::gradclip check: regressed: 2 findings"));
  const std::string many = written([&](std::ostream& out) { write_annotations(regressed(40), out); });
  EXPECT_EQ(lines_of(many), 10u);
  EXPECT_THAT(many, HasSubstr("37 findings"));
  Report passed = regressed();
  passed.findings.clear();
  EXPECT_THAT(written([&](std::ostream& out) { write_annotations(passed, out); }), IsEmpty());
}

TEST(StepSummary, ATableThatNamesCannotBreak) {
  const std::string summary = written([&](std::ostream& out) { write_step_summary(regressed(40), out); });
  EXPECT_THAT(summary, StartsWith("### gradclip check: regressed\n\n"));
  std::istringstream lines(summary);
  std::size_t rows = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("|")) continue;
    ++rows;
    EXPECT_EQ(std::count(line.begin(), line.end(), '|'), 4) << line;
  }
  EXPECT_EQ(rows, 11u);
  EXPECT_THAT(summary, HasSubstr("... and 28 more"));
  EXPECT_THAT(written([&](std::ostream& out) { write_step_summary(regressed(), out); }),
              HasSubstr("<code>&#58;&#58;add&#45;mask&#58;&#58;&#60;x&#62;&#124;&#37;&#92;x0a&#61;1&#44;2</code>"));
}

}  // namespace
}  // namespace gradclip
