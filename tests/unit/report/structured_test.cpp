#include "gradclip/report/structured.hpp"
#include "gradclip/report/text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "gradclip/base/error.hpp"
#include "small_model.hpp"

namespace gradclip {
namespace {

using Json = nlohmann::ordered_json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

Report small_report(const std::string& command = "clip", ClipResult result = small_result(),
                    const Manifest& manifest = small_manifest()) {
  return clip_report(command, "in", manifest, TrainingStep{}, ClipOptions{}, result, "out", ReportRun{});
}

std::string json_of(const Report& report) {
  std::ostringstream out;
  write_json(report, out);
  return out.str();
}

std::string csv_of(const Report& report) {
  std::ostringstream out;
  write_csv(report, out);
  return out.str();
}

std::vector<std::string> keys(const Json& object) {
  std::vector<std::string> names;
  for (const auto& [key, value] : object.items()) names.push_back(key);
  return names;
}

TEST(Json, NothingMeasuredHasNoMean) {
  ClipResult result = small_result();
  result.norm->parameters[1].statistics = TensorStatistics{};
  result.norm->parameters[1].none = 2;
  Report report =
      clip_report("norms", "in", small_manifest(), TrainingStep{}, ClipOptions{}, result, std::nullopt, ReportRun{});
  EXPECT_TRUE(Json::parse(json_of(report))["parameters"][1]["mean"].is_null());
  EXPECT_EQ(Json::parse(json_of(report))["parameters"][0]["mean"], 0.375);
  report.view = view_of(ViewBy::rank, {}, small_manifest(), TrainingStep{}, *result.norm);
  const Json by_rank = Json::parse(json_of(report));
  for (const auto& line : by_rank["view"]["lines"]) EXPECT_TRUE(line["mean"].is_null());
  report.norm->statistics = statistics_of(TensorStatistics{});
  EXPECT_TRUE(Json::parse(json_of(report))["norm"]["mean"].is_null());
  EXPECT_THAT(csv_of(report), Not(HasSubstr("nan,0")));
}

TEST(Json, HasTheContractsKeysInItsOrder) {
  Report report = small_report();
  report.findings.push_back({.kind = "replicas-differ",
                             .parameter = "norm",
                             .ranks = {0, 1},
                             .index = {{1}},
                             .value = 0.5,
                             .message = "copies differ"});
  const Json json = Json::parse(json_of(report));
  EXPECT_THAT(keys(json),
              ElementsAre("format", "version", "command", "dump", "output", "run", "meshes", "scale", "norm", "clip",
                          "reference", "groups", "stages", "dtypes", "parameters", "findings"));
  EXPECT_EQ(json["format"], "gradclip.report");
  EXPECT_EQ(json["version"], 1);
  EXPECT_THAT(keys(json["dump"]), ElementsAre("path", "step", "world_size", "parameters", "elements", "bytes"));
  for (const char* key :
       {"processes", "device", "communicator", "threads", "numerics", "memory_peak_bytes", "seconds"}) {
    EXPECT_TRUE(json["run"].contains(key)) << key;
  }
  for (const char* key : {"device_memory_budget_bytes", "device_memory_peak_bytes", "offload"}) {
    EXPECT_TRUE(json["run"].at(key).is_null()) << key;
  }
  EXPECT_THAT(keys(json["run"]["seconds"]), ElementsAre("read", "compute", "write", "total"));
  EXPECT_EQ(json["scale"]["label_token_divisor"], 4.0);
  EXPECT_TRUE(json["scale"]["expert_divisor"].is_null());
  for (const char* key : {"type", "total", "elements", "zeros", "nan", "posinf", "neginf"}) {
    EXPECT_TRUE(json["norm"].contains(key)) << key;
  }
  for (const char* key : {"max_norm", "coefficient", "clipped", "total_after"}) {
    EXPECT_TRUE(json["clip"].contains(key)) << key;
  }
  EXPECT_EQ(json["reference"]["arithmetic"], "exact");
  EXPECT_THAT(keys(json["reference"]["totals"][0]), ElementsAre("total", "coefficient", "ranks"));
  for (const char* key : {"mesh", "placements", "parameters", "elements", "norm"}) {
    EXPECT_TRUE(json["groups"][0].contains(key)) << key;
  }
  for (const char* key :
       {"name", "model_part", "shape", "dtype", "mesh", "placements", "expert", "elements", "norm", "share", "max_abs",
        "min_abs", "mean", "zeros", "subnormals", "nan", "posinf", "neginf", "first_nonfinite"}) {
    EXPECT_TRUE(json["parameters"][0].contains(key)) << key;
  }
  EXPECT_EQ(json["parameters"][4]["mesh"], nullptr);
  EXPECT_EQ(json["parameters"][4]["min_abs"], nullptr) << "no non-zero element";
  EXPECT_EQ(json["parameters"][3]["counted"], false);
  EXPECT_EQ(
      json["findings"][0].dump(),
      R"({"kind":"replicas-differ","parameter":"norm","ranks":[0,1],"index":[1],"value":0.5,"message":"copies differ"})");
}

TEST(Json, NormsHasNoClip) {
  EXPECT_FALSE(Json::parse(json_of(small_report("norms"))).contains("clip"));
}

TEST(Json, WhatWasNotMeasuredIsNull) {
  ClipResult result = small_result();
  result.norm.reset();
  const Json json = Json::parse(json_of(small_report("clip", result)));
  EXPECT_EQ(json["norm"]["total"], 13.0);
  EXPECT_TRUE(json["norm"]["elements"].is_null());
  EXPECT_TRUE(json["norm"]["nan"].is_null());
  EXPECT_TRUE(json["reference"].is_null());
  EXPECT_TRUE(json["parameters"][0]["norm"].is_null());
  EXPECT_TRUE(json["parameters"][0]["zeros"].is_null());
  EXPECT_TRUE(json["groups"][0]["norm"].is_null());
}

TEST(Json, NonFiniteNumbersAreStrings) {
  ClipResult result = small_result();
  result.norm->total = std::nan("");
  result.coefficient = std::nan("");
  result.total_after = std::numeric_limits<double>::infinity();
  result.norm->parameters[0].norm = -std::numeric_limits<double>::infinity();
  result.norm->parameters[0].statistics.nan = 2;
  result.norm->parameters[0].statistics.first_nonfinite = 3;
  result.norm->parameters[0].statistics.first_nonfinite_rank = 0;
  const Json json = Json::parse(json_of(small_report("clip", result)));
  EXPECT_EQ(json["norm"]["total"], "nan");
  EXPECT_EQ(json["clip"]["coefficient"], "nan");
  EXPECT_EQ(json["clip"]["total_after"], "inf");
  EXPECT_EQ(json["parameters"][0]["norm"], "-inf");
  EXPECT_EQ(json["parameters"][0]["first_nonfinite"].dump(), R"({"index":[1,1],"rank":0})");
}

TEST(Json, NumbersReadBackToTheSameBits) {
  for (const double total : {0.1, 1.0 / 3.0, 5e-324, 1.7976931348623157e308, 3.359255944131254, 1e22}) {
    ClipResult result = small_result();
    result.norm->total = total;
    const Json json = Json::parse(json_of(small_report("clip", result)));
    EXPECT_EQ(json["norm"]["total"].get<double>(), total);
  }
}

TEST(Json, HostileNamesReachTheTerminalOnlyEscaped) {
  Manifest manifest = small_manifest();
  const std::string hostile = "a\"b\\c\n\x1b[31m\xE2\x80\xAE\xC2\x9B<script>";
  manifest.parameters[0].name = hostile;
  manifest.parameters[1].name = "broken \xFF utf-8";
  const std::string text = json_of(small_report("clip", small_result(), manifest));
  for (const char c : text) {
    EXPECT_TRUE(c == '\n' || (c >= 0x20 && c < 0x7F)) << static_cast<int>(c);
  }
  EXPECT_EQ(Json::parse(text)["parameters"][0]["name"], hostile);
}

TEST(Json, InspectSaysWhatTheManifestSays) {
  Manifest manifest = small_manifest();
  manifest.training.grad_norm = std::nan("");
  const Json json = Json::parse(json_of(inspect_report("in", manifest)));
  EXPECT_EQ(json["command"], "inspect");
  EXPECT_EQ(json["state"], "before_scale");
  EXPECT_EQ(json["training"]["grad_norm"], "nan");
  EXPECT_EQ(json["meshes"][0].dump(), R"({"name":"world","dim_names":["pp","dp"],"shape":[2,2],"ranks":[0,1,2,3],)"
                                      R"("device_mesh":true,"moe_mesh":false})");
  EXPECT_EQ(json["plain_tensors"][0].dump(), R"({"name":"bias","copies":"distinct","ranks":2})");
  EXPECT_FALSE(json.contains("norm"));
  EXPECT_FALSE(json.contains("reference"));
}

TEST(Json, FactSheet) {
  std::ostringstream out;
  write_json(FactSheet{"doctor", {{"versions", {{"mpi", "4"}}}, {"empty", {}}}}, out);
  EXPECT_EQ(Json::parse(out.str()).dump(),
            R"({"format":"gradclip.report","version":1,"command":"doctor","versions":{"mpi":"4"},"empty":{}})");
}

TEST(FactSheet, HasNumbersForProgramsAndATextForPeople) {
  const FactSheet sheet{"doctor",
                        {{"memory",
                          {{"physical", "4.1 kB", {{"bytes", std::uint64_t{4096}}, {"limit", nullptr}}},
                           {"share", "half", {{"part", 0.5}, {"whole", false}}}}}}};
  std::ostringstream json, csv, text;
  write_json(sheet, json);
  EXPECT_EQ(Json::parse(json.str())["memory"].dump(), R"({"bytes":4096,"limit":null,"part":0.5,"whole":false})");
  write_csv(sheet, csv);
  EXPECT_EQ(csv.str(), "section,fact,value\nmemory,bytes,4096\nmemory,limit,\nmemory,part,0.5\nmemory,whole,false\n");
  write_facts(sheet, {}, text);
  EXPECT_THAT(text.str(), HasSubstr("physical  4.1 kB"));
}

TEST(Csv, OneLineAParameter) {
  const std::string text = csv_of(small_report());
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 6);
  EXPECT_THAT(text, HasSubstr("\nnorm,0,3,float32,stage0,Replicate(),false,true,3,4.0,"));
  EXPECT_THAT(text, HasSubstr("\nembed,0,4x2,float32,stage0,Shard(0),false,true,8,3.0,"));
}

TEST(Csv, FormulasAreTextAndQuotesAreDoubled) {
  for (const char* hostile : {"=1+1", "+1", "-1", "@x", "\tx", "\rx"}) {
    Manifest manifest = small_manifest();
    manifest.parameters[0].name = hostile;
    const std::string text = csv_of(small_report("clip", small_result(), manifest));
    EXPECT_THAT(text, testing::AnyOf(HasSubstr("\n'" + std::string(hostile) + ","),
                                     HasSubstr("\n\"'" + std::string(hostile) + "\",")));
  }
  Manifest manifest = small_manifest();
  manifest.parameters[0].name = "a,\"b\"\nc";
  EXPECT_THAT(csv_of(small_report("clip", small_result(), manifest)), HasSubstr("\n\"a,\"\"b\"\"\nc\",0,"));
}

TEST(Csv, NonFiniteNumbersAreWords) {
  ClipResult result = small_result();
  result.norm->parameters[1].norm = std::nan("");
  EXPECT_THAT(csv_of(small_report("clip", result)), HasSubstr(",3,nan,"));
}

TEST(ReportFormat, ComesFromTheEnding) {
  EXPECT_EQ(report_format("a/b.json"), ReportFormat::json);
  EXPECT_EQ(report_format("b.csv"), ReportFormat::csv);
  EXPECT_EQ(report_format("b.xml"), ReportFormat::junit);
  for (const char* name : {"a.htm", "a.txt", "json", ".json", "a"}) {
    try {
      static_cast<void>(report_format(name));
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage) << name;
      EXPECT_THAT(error.what(), HasSubstr(".json, .csv, .html or .xml"));
    }
  }
}

TEST(Json, ManyParameters) {
  Report report = small_report();
  const ReportParameter parameter = report.parameters[0];
  report.parameters.assign(20'000, parameter);
  const std::string text = json_of(report);
  EXPECT_EQ(Json::parse(text)["parameters"].size(), 20'000u);
}

}  // namespace
}  // namespace gradclip
