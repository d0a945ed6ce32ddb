#include "options.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>

#include "gradclip/base/error.hpp"
#include "option_values.hpp"
#include "temporary_directory.hpp"
#include "variables.hpp"

namespace gradclip {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

CommandLine parse(std::vector<const char*> words, const std::map<std::string, std::string>& variables = {}) {
  words.insert(words.begin(), "gradclip");
  return parse_command_line(static_cast<int>(words.size()), words.data(), [&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string refusal(const std::vector<const char*>& words, const std::map<std::string, std::string>& variables = {}) {
  try {
    static_cast<void>(parse(words, variables));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "was not refused";
  return {};
}

class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) { std::ofstream(path_) << text; }
  [[nodiscard]] const char* path() const { return path_.c_str(); }

 private:
  test::TemporaryDirectory directory_;
  std::string path_ = (directory_ / "options.json").string();
};

TEST(Options, WhatIsAlmostAnOptionIsAskedFor) {
  const ConfigFile file(R"({"max_norm": 1})");
  for (const auto& [word, meant] : std::map<const char*, const char*>{{"--max-nrom=1", "--max-norm"},
                                                                      {"--maxnorm", "--max-norm"},
                                                                      {"-max-norm", "--max-norm"},
                                                                      {"--no-clp", "--no-clip"},
                                                                      {"--no-forech", "--no-foreach"},
                                                                      {"--hlep", "--help"},
                                                                      {"--sweeep", "--sweep"}}) {
    EXPECT_THAT(refusal({"norms", "in", word}), HasSubstr(std::string("did you mean ") + meant + "?")) << word;
  }
  EXPECT_THAT(refusal({"norms", "in", "--frobnicate"}), Not(HasSubstr("did you mean")));
  EXPECT_THAT(refusal({"inspect", "in", "--sweeep", "1"}), Not(HasSubstr("did you mean"))) << "no option of inspect's";
  EXPECT_THAT(refusal({"norms", "in", "--config", file.path()}), HasSubstr("did you mean max-norm?"));
}

TEST(Options, VariablesThatSetNothingAreWarnedOf) {
  EXPECT_THAT(variables_without_option({"GRADCLIP_MAX_NORM", "GRADCLIP_NO_PP", "GRADCLIP_CONFIG", "GRADCLIP_OUTPUT",
                                        "GRADCLIP_CPU_KERNELS", "GRADCLIP_NCCL_TIMEOUT", "GRADCLIP_EMULATION_DEVICES"}),
              testing::IsEmpty());
  EXPECT_THAT(
      variables_without_option({"GRADCLIP_FROBNICATE", "GRADCLIP_MAX_NROM", "GRADCLIP_PP", "GRADCLIP_max_norm"}),
      testing::ElementsAre("the environment variable GRADCLIP_FROBNICATE is no option's",
                           "the environment variable GRADCLIP_MAX_NROM is no option's; did you mean "
                           "GRADCLIP_MAX_NORM?",
                           "the environment variable GRADCLIP_max_norm is no option's"));
}

TEST(Options, NumbersThatAreTooLargeAreToldTheirRange) {
  EXPECT_THAT(refusal({"norms", "in", "--threads", "999999"}), HasSubstr("a whole number from 1 to 65536"));
  EXPECT_THAT(refusal({"norms", "in", "--threads", "0"}), HasSubstr("from 1 to 65536"));
  EXPECT_THAT(refusal({"diff", "a", "b", "--max-elements", "99999999"}), HasSubstr("a whole number from 0 to "));
  EXPECT_THAT(refusal({"norms", "in", "--top", "99999999999999999999"}), HasSubstr("from 1 to 4611686018427387904"));
}

TEST(Options, PlainStructsOfEverything) {
  const CommandLine line = parse({"clip",
                                  "in",
                                  "-o",
                                  "out",
                                  "--max-norm",
                                  "0.5",
                                  "--norm-type",
                                  "inf",
                                  "--nonfinite",
                                  "skip",
                                  "--no-pp",
                                  "--pp-axis",
                                  "stage",
                                  "--ep-axis=ep",
                                  "--num-label-tokens",
                                  "8192",
                                  "--dp-group-size",
                                  "4",
                                  "--expert-tp-replication-factor",
                                  "2",
                                  "--no-foreach",
                                  "--use-torch-clip-grad-norm",
                                  "--no-scale",
                                  "--total-norm",
                                  "0x1.8p+1",
                                  "--overwrite",
                                  "--device",
                                  "cpu",
                                  "--threads",
                                  "3",
                                  "--memory-budget",
                                  "512Mi",
                                  "--device-memory-budget",
                                  "1.5G",
                                  "--offload",
                                  "--numerics",
                                  "automodel-cpu",
                                  "--report",
                                  "r.json",
                                  "--format",
                                  "json",
                                  "--quiet",
                                  "--strict",
                                  "--color",
                                  "never",
                                  "--progress"});
  EXPECT_EQ(line.command, Command::clip);
  EXPECT_EQ(line.dump, "in");
  EXPECT_EQ(line.output, "out");
  EXPECT_EQ(line.scale.max_norm, 0.5);
  EXPECT_TRUE(line.scale.norm_type->infinite());
  EXPECT_EQ(line.clip.nonfinite, NonfinitePolicy::skip);
  EXPECT_EQ(line.scale.pp, false);
  EXPECT_EQ(line.scale.pp_axis, "stage");
  EXPECT_EQ(line.scale.ep_axis, "ep");
  EXPECT_EQ(line.scale.num_label_tokens, 8192);
  EXPECT_EQ(line.scale.dp_group_size, 4);
  EXPECT_EQ(line.scale.expert_tp_replication_factor, 2);
  EXPECT_EQ(line.scale.foreach, false);
  EXPECT_EQ(line.scale.use_torch_clip_grad_norm, true);
  EXPECT_TRUE(line.clip.no_scale);
  EXPECT_EQ(line.clip.total_norm, 3.0);
  EXPECT_TRUE(line.overwrite);
  EXPECT_EQ(line.common.device, DeviceChoice::cpu);
  EXPECT_EQ(line.common.threads, 3u);
  EXPECT_EQ(line.common.memory_budget, std::uint64_t{512} << 20);
  EXPECT_EQ(line.common.device_memory_budget, 1'500'000'000u);
  EXPECT_TRUE(line.common.offload);
  EXPECT_EQ(line.clip.numerics, Numerics::automodel_cpu);
  EXPECT_EQ(line.common.report, "r.json");
  EXPECT_EQ(line.common.format, OutputFormat::json);
  EXPECT_TRUE(line.common.quiet);
  EXPECT_TRUE(line.common.strict);
  EXPECT_EQ(line.common.colour, ColourChoice::never);
  EXPECT_EQ(line.common.progress, true);
}

TEST(Options, WhatWasNotGivenStaysEmpty) {
  const CommandLine line = parse({"norms", "in"});
  EXPECT_FALSE(line.scale.max_norm.has_value());
  EXPECT_FALSE(line.scale.pp.has_value());
  EXPECT_FALSE(line.common.progress.has_value());
  EXPECT_FALSE(line.common.threads.has_value());
  EXPECT_FALSE(line.common.device_memory_budget.has_value());
  EXPECT_FALSE(line.common.offload);
  EXPECT_EQ(line.table.order, ParameterOrder::model);
  EXPECT_EQ(parse({"norms", "in", "--top", "5"}).table.order, ParameterOrder::norm);
  EXPECT_EQ(parse({"norms", "in", "--top", "5", "--sort", "name"}).table.order, ParameterOrder::name);
}

TEST(Options, TheLastOfSeveralCounts) {
  EXPECT_EQ(parse({"norms", "in", "--max-norm", "1", "--max-norm", "2"}).scale.max_norm, 2.0);
  EXPECT_EQ(parse({"norms", "in", "--pp", "--no-pp"}).scale.pp, false);
  EXPECT_EQ(parse({"norms", "in", "--no-pp", "--pp"}).scale.pp, true);
}

TEST(Options, CommandLineBeatsEnvironmentBeatsFile) {
  const ConfigFile file(
      R"({"max-norm": 3, "norm-type": "inf", "threads": 7, "pp": true, "top": 9, "overwrite": true})");
  const std::map<std::string, std::string> variables{{"GRADCLIP_MAX_NORM", "2"}, {"GRADCLIP_THREADS", "5"}};
  const CommandLine line = parse({"norms", "in", "--max-norm", "1", "--config", file.path()}, variables);
  EXPECT_EQ(line.scale.max_norm, 1.0);
  EXPECT_EQ(line.common.threads, 5u);
  EXPECT_TRUE(line.scale.norm_type->infinite());
  EXPECT_EQ(line.scale.pp, true);
  EXPECT_EQ(line.table.top, 9u);
  EXPECT_FALSE(line.overwrite) << "an option of another command is known, and not for this one";
  EXPECT_EQ(parse({"norms", "in", "--no-pp", "--config", file.path()}).scale.pp, false);
  EXPECT_EQ(parse({"norms", "in"}, {{"GRADCLIP_CONFIG", file.path()}}).scale.max_norm, 3.0);
}

TEST(Options, OppositesAndEmptyVariables) {
  EXPECT_EQ(parse({"norms", "in"}, {{"GRADCLIP_NO_PP", "1"}}).scale.pp, false);
  EXPECT_EQ(parse({"norms", "in"}, {{"GRADCLIP_PP", "off"}}).scale.pp, false);
  EXPECT_EQ(parse({"norms", "in"}, {{"GRADCLIP_MAX_NORM", ""}}).scale.max_norm, std::nullopt);
  const ConfigFile file(R"({"no-foreach": true, "quiet": true})");
  const CommandLine line = parse({"norms", "in", "--config", file.path()});
  EXPECT_EQ(line.scale.foreach, false);
  EXPECT_TRUE(line.common.quiet);
  EXPECT_THAT(refusal({"norms", "in"}, {{"GRADCLIP_NO_PP", "1"}, {"GRADCLIP_PP", "1"}}), HasSubstr("GRADCLIP_NO_PP"));
}

TEST(Options, NoClipAgainstMaxNorm) {
  refusal({"norms", "in", "--no-clip", "--max-norm", "1"});
  EXPECT_FALSE(parse({"norms", "in", "--max-norm", "1"}, {{"GRADCLIP_NO_CLIP", "1"}}).scale.no_clip);
  const CommandLine line = parse({"norms", "in", "--no-clip"}, {{"GRADCLIP_MAX_NORM", "1"}});
  EXPECT_TRUE(line.scale.no_clip);
  EXPECT_FALSE(line.scale.max_norm.has_value());
}

TEST(Options, RefusalsSayWhereTheValueCameFrom) {
  EXPECT_THAT(refusal({"norms", "in", "--max-norm", "-1"}), HasSubstr("--max-norm: '-1'"));
  EXPECT_THAT(refusal({"norms", "in"}, {{"GRADCLIP_MAX_NORM", "-1"}}), HasSubstr("GRADCLIP_MAX_NORM: '-1'"));
  const ConfigFile file(R"({"max-norm": -1})");
  EXPECT_THAT(refusal({"norms", "in", "--config", file.path()}), HasSubstr("'max-norm' in config file"));
}

TEST(Options, ValuesThatCannotBe) {
  for (const char* value : {"-1", "nan", "-inf", "1e400", "1,5", "", "x", "0x", "1 "}) {
    refusal({"norms", "in", "--max-norm", value});
  }
  for (const char* value : {"0", "-2", "nan", "1e-400", "two"}) refusal({"norms", "in", "--norm-type", value});
  for (const char* value : {"0", "-1", "1.5", "99999999999999999999"})
    refusal({"norms", "in", "--dp-group-size", value});
  for (const char* value : {"0", "1Q", "1.5.2G", "-1G", "G", "1e3", "99999999T", "1KiBs"}) {
    refusal({"norms", "in", "--memory-budget", value});
    refusal({"norms", "in", "--device-memory-budget", value});
  }
  for (const char* value : {"-1", "1.5", "automatic", ""}) refusal({"norms", "in", "--num-label-tokens", value});
  for (const char* value : {"", ",dp", "dp,", "dp,,cp"}) refusal({"tokens", "in", "--dp-axes", value});
  refusal({"tokens", "in", "--ignore-index", "-100.5"});
  EXPECT_EQ(parse({"norms", "in", "--by", "module", "--depth", "2"}).table.by, ViewBy::module);
  EXPECT_EQ(parse({"norms", "in", "--by", "module", "--depth", "2"}).table.depth, 2u);
  EXPECT_THAT(refusal({"norms", "in", "--by", "layer"}), HasSubstr("module, group, stage, dtype, rank"));
  EXPECT_THAT(refusal({"norms", "in", "--by", "module", "--depth", "0"}), HasSubstr("at least 1"));
  EXPECT_THAT(refusal({"norms", "in", "--by", "rank", "--depth", "2"}), HasSubstr("--by module"));
  EXPECT_THAT(refusal({"norms", "in", "--report", "x.pdf"}), HasSubstr(".json, .csv, .html or .xml"));
  EXPECT_THAT(refusal({"norms", "in", "--numerics", "fast"}), HasSubstr("automodel-cpu"));
}

TEST(Options, EveryCommandHasTheReportsItCanFill) {
  const std::vector<std::vector<const char*>> commands{{"clip", "in", "-o", "out"},
                                                       {"norms", "in"},
                                                       {"inspect", "in"},
                                                       {"verify", "in"},
                                                       {"diff", "in", "other"},
                                                       {"tokens", "in"},
                                                       {"doctor"},
                                                       {"check", "in", "--baseline", "b.json"},
                                                       {"accumulate", "a", "b", "-o", "out"},
                                                       {"merge", "in", "-o", "out"},
                                                       {"synth", "-o", "out", "--model", "tiny-moe"}};
  for (const std::vector<const char*>& words : commands) {
    const std::string command = words[0];
    const bool facts = command == "doctor" || command == "synth";
    for (const char* file : {"r.json", "r.csv", "r.html", "r.xml"}) {
      std::vector<const char*> all = words;
      all.insert(all.end(), {"--report", file});
      const std::string name = file;
      if ((name != "r.html" || !facts) && (name != "r.xml" || !(facts || command == "inspect"))) {
        EXPECT_EQ(parse(all).common.report, name) << command;
        continue;
      }
      EXPECT_THAT(refusal(all), AllOf(HasSubstr("--report '" + name + "'"), HasSubstr(command),
                                      HasSubstr(facts ? ".json or .csv" : ".json, .csv or .html")));
    }
  }
  EXPECT_THAT(refusal({"doctor", "--report", "d.html"}), HasSubstr("reports of doctor have no page"));
  EXPECT_THAT(refusal({"inspect", "in", "--report", "d.xml"}), HasSubstr("nothing that passes or fails"));
}

TEST(Options, LabelsAreCountedWhereItIsAskedFor) {
  const CommandLine line = parse({"norms", "in", "--num-label-tokens", "auto", "--ignore-index", "-7"});
  EXPECT_TRUE(line.labels.count);
  EXPECT_FALSE(line.scale.num_label_tokens.has_value());
  EXPECT_EQ(line.labels.ignore_index, -7);
  EXPECT_FALSE(parse({"norms", "in", "--num-label-tokens", "7"}).labels.count);

  TrainingRecord recorded;
  EXPECT_EQ(label_options({}, {}, recorded).ignore_index, -100);
  EXPECT_EQ(label_options({}, {}, recorded).pp_axis_name, "pp");
  recorded.ignore_index = 3;
  recorded.pp_axis_name = "stage";
  EXPECT_EQ(label_options({}, {}, recorded).ignore_index, 3);
  EXPECT_EQ(label_options({}, {}, recorded).pp_axis_name, "stage");
  EXPECT_EQ(label_options(line.labels, "pipe", recorded).ignore_index, -7);
  EXPECT_EQ(label_options(line.labels, "pipe", recorded).pp_axis_name, "pipe");
  EXPECT_EQ(parse({"tokens", "in", "--dp-axes", "dp,cp"}).labels.dp_axes, (std::vector<std::string>{"dp", "cp"}));
}

TEST(Options, AccumulateTakesSeveralDumps) {
  const CommandLine line = parse({"accumulate", "a", "b", "c", "-o", "out", "--dtype", "bfloat16"});
  EXPECT_EQ(line.dump, "a");
  EXPECT_EQ(line.more_dumps.size(), 2u);
  EXPECT_EQ(line.accumulate.types.storage, DType::bfloat16);
  EXPECT_FALSE(line.accumulate.types.reduce.has_value());
  EXPECT_FALSE(line.accumulate.sync.has_value());
  EXPECT_FALSE(line.checked.has_value());
}

TEST(Options, AccumulateComparesWithWhatTrainingHad) {
  const CommandLine line = parse({"accumulate", "a", "--check", "b", "--ulp", "2", "--sync", "schedule"});
  ASSERT_TRUE(line.checked.has_value());
  EXPECT_EQ(*line.checked, "b");
  EXPECT_EQ(line.diff.rule.ulps, 2u);
  EXPECT_EQ(line.accumulate.sync, Synchronisation::schedule);
  EXPECT_TRUE(line.output.empty());
  refusal({"accumulate", "a"});
  refusal({"accumulate", "a", "-o", "out", "--ulp", "2"});
  refusal({"accumulate", "a", "-o", "out", "--sync", "never"});
}

TEST(Options, WordsThatCannotBe) {
  refusal({});
  refusal({"clip"});
  refusal({"clip", "in"});
  refusal({"clip", "in", "-o", "out", "more"});
  refusal({"inspect", "in", "--offload"});
  refusal({"inspect", "in", "--device-memory-budget", "1G"});
  refusal({"norms", "in", "--bogus"});
  refusal({"norms", "in", "--max-norm"});
  refusal({"norms", "in", "--pp=maybe"});
  refusal({"norms", "in", "--overwrite"});
  refusal({"--quiet", "norms", "in"});
  EXPECT_THAT(refusal({"frobnicate"}), HasSubstr("no command 'frobnicate'"));
  EXPECT_THAT(refusal({"nroms"}), HasSubstr("no command 'nroms'; did you mean norms?"));
  EXPECT_THAT(refusal({"help", "norm"}), HasSubstr("did you mean norms?"));
  EXPECT_THAT(refusal({"frobnicate"}), Not(HasSubstr("did you mean")));
  EXPECT_THAT(refusal({"accumulate", "in"}), HasSubstr("--output OUT is missing"));
  EXPECT_THAT(refusal({"accumulate", "in", "-o", "out", "--dtype", "float8_e5m2"}), HasSubstr("float16"));
  EXPECT_THAT(refusal({"accumulate", "in", "-o", "out", "--reduce-dtype", "float8_e5m2"}), HasSubstr("float16"));
}

TEST(Options, ConfigFilesThatCannotBe) {
  for (const char* text : {"", "[1]", "{\"max-norm\": 1, \"max-norm\": 2}", "{\"bogus\": 1}", "{\"max-norm\": [1]}",
                           "{\"max-norm\": null}", "{\"max-norm\": 1e400}", "{\"max-norm\": 1} x",
                           "{\"--max-norm\": 1}", "{\"quiet\": \"maybe\"}"}) {
    const ConfigFile file(text);
    refusal({"norms", "in", "--config", file.path()});
  }
  refusal({"norms", "in", "--config", "/nonexistent/file.json"});
}

TEST(Options, HelpAndVersionNeedNothingElse) {
  EXPECT_THAT(*parse({"--help"}).answer, HasSubstr("inspect"));
  EXPECT_THAT(*parse({"clip", "--help"}).answer, HasSubstr("--total-norm X"));
  EXPECT_THAT(*parse({"--help"}).answer, HasSubstr("gradclip help COMMAND"));
  EXPECT_EQ(*parse({"help", "clip"}).answer, *parse({"clip", "--help"}).answer);
  EXPECT_EQ(*parse({"help"}).answer, *parse({"--help"}).answer);
  EXPECT_THAT(*parse({"norms", "-h"}).answer, Not(HasSubstr("--total-norm")));
  EXPECT_THAT(*parse({"doctor", "--version"}).answer, HasSubstr("gradclip "));
  EXPECT_THAT(*parse({"--version"}).answer, HasSubstr("gradclip "));
}

TEST(Options, ADumpMayHaveACommandsName) {
  EXPECT_EQ(parse({"inspect", "norms"}).dump, "norms");
}

TEST(Numbers, DecimalAndHexadecimal) {
  EXPECT_EQ(parse_number("1e-3"), 1e-3);
  EXPECT_EQ(parse_number("+2.5"), 2.5);
  EXPECT_EQ(parse_number("-0"), 0.0);
  EXPECT_EQ(parse_number("0x1.adfc194977facp+1"), 0x1.adfc194977facp+1);
  EXPECT_EQ(parse_number("-0X1P-3"), -0.125);
  EXPECT_EQ(parse_number("inf"), std::numeric_limits<double>::infinity());
  EXPECT_EQ(parse_number("-inf"), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(*parse_number("nan")));
  for (const char* text :
       {"", "+", "+-1", "--1", "1e400", "1e-400", "0x", "0xinf", "0x-1", "1.0f", " 1", "1 ", "1,0"}) {
    EXPECT_FALSE(parse_number(text).has_value()) << text;
  }
}

TEST(Numbers, Sizes) {
  EXPECT_EQ(parse_size("4096"), 4096u);
  EXPECT_EQ(parse_size("1.5G"), 1'500'000'000u);
  EXPECT_EQ(parse_size("2k"), 2000u);
  EXPECT_EQ(parse_size("2KiB"), 2048u);
  EXPECT_EQ(parse_size("1GB"), 1'000'000'000u);
  EXPECT_EQ(parse_size("1Ti"), std::uint64_t{1} << 40);
  EXPECT_EQ(parse_size("10B"), 10u);
  for (const char* text : {"", "B", "i", "1i", "0", "0.1", "-1", "1x", "1GG", "inf", "nan", "0x10", "99999999T"}) {
    EXPECT_FALSE(parse_size(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace gradclip
