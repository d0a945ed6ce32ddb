#include "gradclip/analysis/baseline.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using testing::HasSubstr;

Baseline sample() {
  Baseline baseline;
  baseline.step = 100;
  baseline.conditions = {2.0, "exact", 128.0, std::nullopt};
  baseline.tolerance = {1e-6, 0.0, 0.25};
  baseline.rules.push_back({"experts\\.\\d+", 1e-3, std::nullopt, 0.5});
  baseline.total = {12, 1, 0, 0, 0, 0.1, 0.0625};
  baseline.parameters.push_back({"layers.0.weight", {3, 2}, DType::bfloat16, {6, 1, 0, 0, 0, 1.0 / 3.0, 5e-324}});
  baseline.parameters.push_back({"a \"b\"\n\u00fc", {}, DType::float64, {1, 0, 1, 2, 3, std::nan(""), 1e300}});
  baseline.findings.push_back({"ranks-disagree", ""});
  baseline.findings.push_back({"replicas-differ", "layers.0.weight", {0, 3}, 0.1});
  baseline.findings.push_back({"tied-differ", "layers.0.weight", {7}, std::nan("")});
  return baseline;
}

std::string refusal(const std::string& text) {
  try {
    static_cast<void>(parse_baseline(text, "baseline 'b.json'"));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::bad_input) << text;
    EXPECT_THAT(error.what(), HasSubstr("baseline 'b.json'"));
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text;
  return {};
}

/// The sample's text with a piece of it replaced.
std::string with(const std::string& piece, const std::string& other) {
  std::string text = baseline_text(sample());
  const std::size_t at = text.find(piece);
  EXPECT_NE(at, std::string::npos) << piece;
  return text.replace(at, piece.size(), other);
}

TEST(Baseline, ReadsBackWhatItWrites) {
  const std::string text = baseline_text(sample());
  const Baseline read = parse_baseline(text, "b");
  EXPECT_EQ(baseline_text(read), text);
  ASSERT_EQ(read.parameters.size(), 2u);
  EXPECT_EQ(read.parameters[0].numbers.norm, 1.0 / 3.0);
  EXPECT_EQ(read.parameters[0].numbers.max_abs, 5e-324);
  EXPECT_EQ(read.parameters[1].name, "a \"b\"\n\u00fc");
  EXPECT_TRUE(std::isnan(read.parameters[1].numbers.norm));
  EXPECT_EQ(read.parameters[1].numbers.neginf, 3u);
  EXPECT_EQ(read.rules[0].relative, 1e-3);
  EXPECT_FALSE(read.rules[0].absolute);
  ASSERT_EQ(read.findings.size(), 3u);
  EXPECT_EQ(read.findings[1].kind, "replicas-differ");
  EXPECT_EQ(read.findings[1].parameter, "layers.0.weight");
  EXPECT_EQ(read.findings[1].ranks, (std::vector<std::int32_t>{0, 3}));
  EXPECT_EQ(read.findings[1].value, 0.1);
  EXPECT_FALSE(read.findings[0].value);
  EXPECT_TRUE(std::isnan(*read.findings[2].value));
}

TEST(Baseline, OneLineAParameter) {
  const std::string text = baseline_text(sample());
  EXPECT_THAT(text, HasSubstr("\n    {\"name\": \"layers.0.weight\", \"shape\": [3, 2], \"dtype\": \"bfloat16\", "
                              "\"elements\": 6, \"zeros\": 1, \"norm\": 0.3333333333333333, \"max_abs\": 5e-324},\n"));
  EXPECT_THAT(text, HasSubstr(R"("name": "a \"b\"\n\u00fc", "shape": [])"));
  EXPECT_THAT(text, HasSubstr(R"("nan": 1, "posinf": 2, "neginf": 3, "norm": "nan", "max_abs": 1e+300)"));
  for (const char c : text) EXPECT_TRUE(c == '\n' || (c >= ' ' && c < '\x7f'));
}

TEST(Baseline, NamesTheKeyThatIsWrong) {
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_THAT(refusal(text), HasSubstr(part));
  };
  expect("", "JSON");
  expect("[]", "JSON object");
  expect("{}", "format");
  expect(with("gradclip.baseline", "gradclip.report"), "format");
  expect(with("\"version\": 1", "\"version\": 2"), "newer");
  expect(with("\"version\": 1", "\"version\": 1, \"version\": 1"), "'version' stands twice");
  expect(with("\"numerics\"", "\"numerix\""), "numeri");
  expect(with("\"zeros\": 1, \"norm\": 0.3", "\"zero\": 1, \"norm\": 0.3"), "parameters[0].zero");
  expect(with("\"elements\": 6", "\"elements\": -6"), "parameters[0].elements");
  expect(with("\"elements\": 6", "\"elements\": 6.5"), "parameters[0].elements");
  expect(with("\"elements\": 6", "\"elements\": \"6\""), "parameters[0].elements");
  expect(with("\"norm\": 0.3333333333333333", "\"norm\": -1"), "parameters[0].norm");
  expect(with("\"norm\": 0.3333333333333333", "\"norm\": NaN"), "NaN");
  expect(with("\"norm\": 0.3333333333333333", "\"norm\": 1e999"), "float64");
  expect(with("bfloat16", "bfloat17"), "parameters[0].dtype");
  expect(with("[3, 2]", "[3, -2]"), "parameters[0].shape[1]");
  expect(with("[3, 2]", "6"), "parameters[0].shape");
  expect(with("\"layers.0.weight\"", "\"\""), "parameters[0].name");
  expect(with("\"rtol\": 1e-06", "\"rtol\": \"nan\""), "tolerance.rtol");
  expect(with("\"rtol\": 1e-06", "\"rtol\": -1"), "tolerance.rtol");
  expect(with("\"rtol\": 0.001", "\"rtol\": \"nan\""), "tolerances[0].rtol");
  expect(with("\"rtol\": 0.001", "\"tolerance\": 0.001"), "tolerances[0].tolerance");
  expect(with("experts\\\\.\\\\d+", "experts("), "tolerances[0].pattern");
  expect(with("\"norm_type\": 2.0", "\"norm_type\": 0"), "norm_type");
  expect(with("\"label_token_divisor\"", "\"label_tokens\""), "scale.label_tokens");
  expect(with("ranks-disagree", "::add-mask::"), "findings[0].kind");
  expect(with(", \"ranks\": [0, 3]", ""), "findings[1]: has no key 'ranks'");
  expect(with(", \"value\": 0.1", ""), "findings[1]: has no key 'value'");
  expect(with("[0, 3]", "[3, 0]"), "findings[1].ranks[1]");
  expect(with("[0, 3]", "[3, 3]"), "findings[1].ranks[1]");
  expect(with("[0, 3]", "[-1, 3]"), "findings[1].ranks[0]");
  expect(with("[0, 3]", "[2147483647, 2147483648]"), "findings[1].ranks[1]");
  expect(with("[0, 3]", "3"), "findings[1].ranks");
  expect(with("\"value\": 0.1", "\"value\": \"much\""), "findings[1].value");
  expect(with("  \"total\": {", "  \"total\": [{"), "JSON");
}

TEST(Baseline, EveryTruncationIsRefused) {
  const std::string text = baseline_text(sample());
  for (std::size_t size = 0; size + 2 < text.size(); ++size) refusal(text.substr(0, size));
}

TEST(Baseline, DamagedBytesAreRefusedOrHarmless) {
  const std::string text = baseline_text(sample());
  std::mt19937 random(7);
  std::size_t refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string damaged = text;
    for (std::size_t i = 0; i <= round % 3u; ++i) {
      damaged[random() % damaged.size()] =
          round % 2 == 0 ? static_cast<char>(random()) : "{}[]\",:-0e\\"[random() % 11];
    }
    try {
      const std::string read = baseline_text(parse_baseline(damaged, "baseline 'b.json'"));
      EXPECT_EQ(baseline_text(parse_baseline(read, "again")), read);
    } catch (const Error& error) {
      ++refused;
      ASSERT_EQ(error.code(), ExitCode::bad_input);
      ASSERT_THAT(error.what(), HasSubstr("baseline 'b.json'"));
    }
  }
  EXPECT_GT(refused, 1500u);
}

TEST(Baseline, NoFileIsNoError) {
  EXPECT_FALSE(read_baseline("/nonexistent/directory/baseline.json"));
  EXPECT_THROW(static_cast<void>(read_baseline("/")), Error);
}

}  // namespace
}  // namespace gradclip
