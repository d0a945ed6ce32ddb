#include "gradclip/synth/synthetic_layout.hpp"

#include <gtest/gtest.h>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

TEST(SyntheticLayout, MeshSizes) {
  EXPECT_EQ(parse_mesh_sizes("pp=2,dp_shard=4,tp=2"), (MeshSizes{{"pp", 2}, {"dp_shard", 4}, {"tp", 2}}));
  for (const char* text : {"", "dp", "dp=", "dp=0", "dp=-1", "dp=2x", "xp=2", "dp=2,dp=2", "ep=2", "dp=3,ep=2",
                           "dp=1048576,tp=2", "dp=2,,tp=2", "=2"}) {
    EXPECT_THROW(static_cast<void>(parse_mesh_sizes(text)), Error) << text;
  }
}

/// Every element of every parameter is held by as many ranks as its placements say.
TEST(SyntheticLayout, ShardsCoverTheModel) {
  const ModelDescription model = read_model("moe-tiny");
  for (const char* mesh :
       {"dp=2", "pp=3,dp_shard=2,tp=4", "tp=2,dp_shard=3", "pp=2,dp_replicate=2,dp_shard=2,ep=4", "pp=4"}) {
    const Manifest manifest = synthetic_manifest(model, 4, parse_mesh_sizes(mesh), DType::bfloat16);
    for (const ParameterEntry& entry : manifest.parameters) {
      std::uint64_t counted = 0;
      for (const std::int32_t rank : manifest.holders(entry)) {
        if (manifest.role(entry, rank, false).counted) counted += manifest.layout(entry, rank).elements();
      }
      EXPECT_EQ(counted, entry.elements) << mesh << ' ' << entry.name;
    }
  }
}

TEST(SyntheticLayout, MoreStagesThanLayers) {
  const ModelDescription model = read_model("moe-tiny");
  EXPECT_THROW(static_cast<void>(synthetic_manifest(model, 2, parse_mesh_sizes("pp=3"), DType::float32)), Error);
}

TEST(SyntheticLayout, EveryBuiltInModelIsRead) {
  EXPECT_EQ(builtin_models().size(), 3U);
  for (const BuiltinModel& model : builtin_models()) EXPECT_EQ(read_model(model.name).name, model.name);
}

}  // namespace
}  // namespace gradclip
