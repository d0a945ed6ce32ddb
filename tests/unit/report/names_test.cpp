#include "gradclip/report/names.hpp"

#include <gtest/gtest.h>

#include <set>

#include "gradclip/report/text.hpp"

namespace gradclip {
namespace {

TEST(ModuleOf, CountsLevelsFromTheRoot) {
  const std::string_view name = "layers.0.mlp.up.weight";
  EXPECT_EQ(module_of(name, 1), "layers");
  EXPECT_EQ(module_of(name, 2), "layers.0");
  EXPECT_EQ(module_of(name, 4), "layers.0.mlp.up");
  EXPECT_EQ(module_of(name, 5), "layers.0.mlp.up");
  EXPECT_EQ(module_of(name, std::nullopt), "layers.0.mlp.up");
}

TEST(ModuleOf, OddNames) {
  EXPECT_EQ(module_of("weight", 1), "");
  EXPECT_EQ(module_of("", 1), "");
  EXPECT_EQ(module_of(".weight", 1), "");
  EXPECT_EQ(module_of("a..b", 1), "a");
  EXPECT_EQ(module_of("a..b", 2), "a.");
  EXPECT_EQ(module_of("a.", 3), "a");
}

TEST(ShortenedApart, LeavesWhatFits) {
  const std::vector<std::string> names{"a.weight", "b.weight"};
  EXPECT_EQ(shortened_apart(names, 8), names);
}

TEST(ShortenedApart, CutsInTheMiddle) {
  EXPECT_EQ(shortened_apart({"model.layers.0.self_attn.q_proj.weight"}, 17),
            std::vector<std::string>{"model.l....weight"});
}

TEST(ShortenedApart, KeepsWhatTellsNamesApart) {
  std::vector<std::string> names;
  for (int i = 0; i < 12; ++i) {
    names.push_back("model.language_model.layers." + std::to_string(i) + ".mlp.experts.gate_up_projection.weight");
  }
  names.emplace_back("lm_head.weight");
  for (const std::size_t width : {20u, 24u, 31u, 40u, 60u}) {
    const std::vector<std::string> shown = shortened_apart(names, width);
    EXPECT_EQ(std::set<std::string>(shown.begin(), shown.end()).size(), names.size()) << width;
    for (const std::string& name : shown) EXPECT_LE(columns(name), width) << name;
    EXPECT_EQ(shown.back(), "lm_head.weight");
  }
}

TEST(ShortenedApart, EqualNamesStayEqual) {
  const std::string name = "model.layers.0.self_attn.q_proj.weight";
  const std::vector<std::string> shown = shortened_apart({name, name}, 16);
  EXPECT_EQ(shown[0], shown[1]);
}

TEST(ShortenedApart, CutsBetweenCharacters) {
  std::vector<std::string> names;
  for (const char* middle : {"ä", "ö", "ü"}) {
    names.push_back("ééééééééééééééé" + std::string(middle) + "ééééééééééééééé");
  }
  const std::vector<std::string> shown = shortened_apart(names, 17);
  EXPECT_EQ(std::set<std::string>(shown.begin(), shown.end()).size(), 3u);
  for (const std::string& name : shown) EXPECT_EQ(columns(name), 17u) << name;
}

}  // namespace
}  // namespace gradclip
