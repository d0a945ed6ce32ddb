#include "gradclip/analysis/name_map.hpp"

#include <gtest/gtest.h>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

TEST(NameMap, TheFirstRuleThatMatchesApplies) {
  const NameMap map = NameMap::parse(
      "# comment\n\n^module\\. -> \nlayers\\.(\\d+)\\.attn -> blocks.\\1.attention\r\nlayers -> never\n", "map");
  EXPECT_EQ(map.mapped("module.layers.3.attn.weight"), "layers.3.attn.weight");
  EXPECT_EQ(map.mapped("layers.3.attn.weight"), "blocks.3.attention.weight");
  EXPECT_EQ(map.mapped("layers.3.mlp"), "never.3.mlp");
  EXPECT_EQ(map.mapped("other"), "other");
}

TEST(NameMap, NoRules) {
  EXPECT_EQ(NameMap().mapped("name"), "name");
}

TEST(NameMap, SaysWhatIsWrong) {
  for (const char* text : {"one", "a(b -> c", "a -> \\1", " -> c"}) {
    try {
      static_cast<void>(NameMap::parse(std::string("x -> y\n") + text, "map 'names'"));
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_NE(std::string(error.what()).find("map 'names', line 2"), std::string::npos) << error.what();
    }
  }
}

TEST(NamePattern, MatchesAnywhere) {
  const NamePattern pattern("q_proj|k_proj", "--only");
  EXPECT_TRUE(pattern.matches("layers.0.k_proj.weight"));
  EXPECT_FALSE(pattern.matches("layers.0.v_proj.weight"));
  EXPECT_THROW(NamePattern("*", "--only"), Error);
}

}  // namespace
}  // namespace gradclip
