#include "gradclip/dump/manifest.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "allocations.hpp"
#include "dump_builder.hpp"
#include "expect_error.hpp"
#include "gradclip/dump/checksum.hpp"

namespace gradclip {
namespace {

using nlohmann::json;
using test::DumpBuilder;
using test::expect_error;

json example() {
  DumpBuilder dump("unused", 4);
  dump.mesh("world", {"dp_shard", "tp"}, {2, 2}, {0, 1, 2, 3});
  dump.mesh("moe", {"ep_shard", "ep"}, {1, 2}, {0, 1});
  dump.parameter({.name = "w",
                  .shape = {8, 6},
                  .dtype = "bfloat16",
                  .mesh = "world",
                  .placements = {"_StridedShard(dim=0, sf=2)", "Shard(0)"}});
  dump.parameter({.name = "norm", .shape = {6}, .ranks = {0, 2}, .copies = "replicated"});
  dump.parameter({.name = "flat",
                  .shape = {5},
                  .mesh = "moe",
                  .placements = {"Replicate()", "Flat()"},
                  .flat_ranges = {{0, {0, 3}}, {1, {3, 5}}}});
  dump.training("max_grad_norm", "1.0").training("grad_norm", "\"nan\"").training("norm_type", "\"inf\"");
  return json::parse(dump.manifest_text());
}

Manifest parse(const json& root) {
  return parse_manifest(root.dump(), "FILE");
}

TEST(Manifest, HoldsWhatTheTextSays) {
  json root = example();
  root["device_mesh"] = "world";
  root["moe_mesh"] = json::array({"moe"});
  root["microbatch"] = {{"index", 1}, {"count", 4}};
  root["state"] = "before_clip";
  root["producer"] = {{"name", "gradclip_record"}, {"version", "0.1.0"}, {"framework", "torch 2.9"}};
  root["files"] = {{"rank_00000.h5", {{"bytes", 7}, {"xxh3_64", "00000000000000ff"}}}};
  root["unknown"] = {1, 2};
  const Manifest manifest = parse(root);
  EXPECT_EQ(manifest.world_size, 4);
  EXPECT_EQ(manifest.step, 1);
  EXPECT_EQ(manifest.state, GradientState::before_clip);
  ASSERT_TRUE(manifest.microbatch.has_value());
  EXPECT_EQ(manifest.microbatch->index, 1);
  EXPECT_EQ(manifest.microbatch->count, 4);
  EXPECT_EQ(manifest.producer, "gradclip_record 0.1.0 (torch 2.9)");
  EXPECT_EQ(manifest.meshes[*manifest.device_mesh].name(), "world");
  ASSERT_EQ(manifest.moe_meshes.size(), 1u);
  EXPECT_EQ(manifest.meshes[manifest.moe_meshes[0]].name(), "moe");
  EXPECT_EQ(manifest.files.at("rank_00000.h5").xxh3_64, 255u);
  EXPECT_EQ(manifest.training.max_grad_norm, 1.0);
  EXPECT_TRUE(std::isnan(*manifest.training.grad_norm));
  EXPECT_TRUE(std::isinf(*manifest.training.norm_type));
  EXPECT_FALSE(manifest.training.pp_enabled);
  EXPECT_FALSE(manifest.has_checksum);
  ASSERT_EQ(manifest.parameters.size(), 3u);
  const ParameterEntry& w = manifest.parameters[0];
  EXPECT_EQ(w.elements, 48u);
  EXPECT_EQ(w.dtype, DType::bfloat16);
  EXPECT_EQ(w.placements[0].split_factor, 2);
  EXPECT_EQ(manifest.holders(w), (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(manifest.holders(manifest.parameters[1]), (std::vector<std::int32_t>{0, 2}));
  EXPECT_TRUE(manifest.holds(manifest.parameters[1], 2));
  EXPECT_FALSE(manifest.holds(manifest.parameters[1], 1));
  EXPECT_EQ(manifest.layout(w, 2).offset(), (std::vector<std::int64_t>{2, 0}));  // tp's chunk first, then dp_shard's
  EXPECT_EQ(manifest.layout(manifest.parameters[2], 1).local_shape(), (std::vector<std::int64_t>{2}));
}

TEST(Manifest, MicrobatchesSayHowTheyAccumulate) {
  json root = example();
  root["microbatch"] = {{"index", 0},
                        {"count", 2},
                        {"first_microbatch", true},
                        {"optimizer_step", false},
                        {"synchronised", nullptr},
                        {"schedule_step", 3},
                        {"unknown", 1}};
  root["accumulation"] = {{"sync", "schedule"}, {"compute_dtype", "bfloat16"}, {"storage_dtype", "float32"}};
  root["parameters"][0]["reduce_dtype"] = "float16";
  const Manifest manifest = parse(root);
  EXPECT_EQ(manifest.microbatch->first_microbatch, true);
  EXPECT_EQ(manifest.microbatch->optimizer_step, false);
  EXPECT_FALSE(manifest.microbatch->synchronised.has_value());
  EXPECT_EQ(manifest.microbatch->schedule_step, 3);
  EXPECT_EQ(manifest.accumulation.sync, Synchronisation::schedule);
  EXPECT_EQ(manifest.accumulation.compute_dtype, DType::bfloat16);
  EXPECT_FALSE(manifest.accumulation.reduce_dtype.has_value());
  EXPECT_EQ(manifest.accumulation.storage_dtype, DType::float32);
  EXPECT_EQ(manifest.parameters[0].reduce_dtype, DType::float16);
  EXPECT_FALSE(manifest.parameters[0].storage_dtype.has_value());
  EXPECT_EQ(manifest.parameters[1].reduce_dtype, std::nullopt);
}

TEST(Manifest, AReplicationFactorIsAnInteger) {
  for (const json& value : {json(true), json(2.0), json("2")}) {
    json root = example();
    root["training"]["expert_tp_replication_factor"] = value;
    expect_error(ExitCode::bad_input, {"training.expert_tp_replication_factor"}, [&] { parse(root); });
  }
}

TEST(Manifest, RolesOfPlainTensorsFollowCopies) {
  json root = example();
  const Manifest manifest = parse(root);
  const ParameterEntry& norm = manifest.parameters[1];
  EXPECT_TRUE(manifest.role(norm, 0, false).counted);
  EXPECT_FALSE(manifest.role(norm, 2, false).counted);
  EXPECT_EQ(manifest.role(norm, 2, false).copies, (std::vector<std::int32_t>{0, 2}));
  root["parameters"][1]["copies"] = "distinct";
  const Manifest distinct = parse(root);
  EXPECT_TRUE(distinct.role(distinct.parameters[1], 2, false).counted);
  EXPECT_EQ(distinct.role(distinct.parameters[1], 2, false).copies, (std::vector<std::int32_t>{2}));
  root["parameters"][1].erase("copies");
  const Manifest undeclared = parse(root);
  EXPECT_FALSE(undeclared.role(undeclared.parameters[1], 2, false).counted);
  EXPECT_TRUE(undeclared.role(undeclared.parameters[1], 2, true).counted);
}

TEST(Manifest, ExpertsAreThoseOfMeshMarkOrName) {
  json root = example();
  root["parameters"][1]["name"] = "model.mlp.experts.gate_up_linear.weight12";
  const Manifest manifest = parse(root);
  EXPECT_FALSE(manifest.is_expert(manifest.parameters[0], "ep"));
  EXPECT_TRUE(manifest.is_expert(manifest.parameters[1], ""));
  EXPECT_TRUE(manifest.is_expert(manifest.parameters[2], "ep"));
  EXPECT_FALSE(manifest.is_expert(manifest.parameters[2], ""));
  root["parameters"][0]["expert"] = true;
  EXPECT_TRUE(parse(root).is_expert(parse(root).parameters[0], ""));
}

struct Mutation {
  const char* pointer;  // JSON pointer of what is replaced
  const char* value;    // JSON text; empty: removed
  const char* message;
};

TEST(Manifest, EveryRuleNamesThePlaceAndTheReason) {
  const std::vector<Mutation> mutations{
      {"/format", R"("other")", "format: is the string 'other'; expected \"gradclip.dump\""},
      {"/format", "", "has no key 'format'"},
      {"/version", "2", "version: is version 2; expected version 1; use a newer gradclip"},
      {"/version", R"("1")", "version: is the string '1'"},
      {"/world_size", "0", "world_size: is the number 0; expected an integer from 1 to 16777216"},
      {"/world_size", "16777217", "world_size: is the number 16777217"},
      {"/world_size", "1.5", "world_size: is the number 1.5"},
      {"/world_size", "3", "ranks[1][1]: is rank 3; expected a rank below the world size of 3"},
      {"/rank_file", R"("rank.h5")", "rank_file"},
      {"/rank_file", R"("{rank}{rank}")", "exactly one {rank}"},
      {"/rank_file", R"("../{rank}.h5")", "no directory separator"},
      {"/rank_file", R"("{rank:5d}.h5")", "rank_file"},
      {"/rank_file", R"("{rank:0d}.h5")", "rank_file"},
      {"/rank_file", R"("{rank:021d}.h5")", "rank_file"},
      {"/rank_file", R"("{rank:05x}.h5")", "rank_file"},
      {"/rank_file", R"("{rank:05d}}.h5")", "rank_file"},
      {"/rank_file", R"("}{rank")", "rank_file"},
      {"/rank_file", R"("{ rank}")", "rank_file"},
      {"/rank_file", R"("a\u0000{rank}")", "rank_file"},
      {"/rank_file", "", "has no key 'rank_file'"},
      {"/step", R"("1")", "step: is the string '1'"},
      {"/microbatch", R"({"index":4,"count":4})", "microbatch.index: is the number 4; expected an integer from 0 to 3"},
      {"/microbatch", R"({"index":0})", "microbatch: has no key 'count'"},
      {"/microbatch", R"({"index":0,"count":0})", "microbatch.count"},
      {"/state", R"("clipped")", "state: is the string 'clipped'"},
      {"/device_mesh", R"("nowhere")", "device_mesh: names the mesh 'nowhere', which is not in \"meshes\""},
      {"/moe_mesh", R"(["moe","x"])", "moe_mesh[1]: names the mesh 'x'"},
      {"/moe_mesh", "1", "moe_mesh: is the number 1"},
      {"/meshes", "[]", "meshes: is a list of 0 elements; expected an object"},
      {"/meshes/world/dim_names", R"(["a"])", "meshes.world: mesh 'world': 1 dimension names for 2 dimensions"},
      {"/meshes/world/dim_names", R"(["a","a"])", "both named 'a'"},
      {"/meshes/world/dim_names", R"(["a",""])", "meshes.world.dim_names[1]"},
      {"/meshes/world/ranks", "[[0,1],[2]]", "meshes.world.ranks[1]: is a list of 1 elements; expected a list of 2"},
      {"/meshes/world/ranks", "[[0,1],[2,[3]]]", "meshes.world.ranks[1][1]"},
      {"/meshes/world/ranks", "[[0,1],[2,1]]", "rank 1"},
      {"/meshes/world/ranks", "[[0,1],[2,4]]", "meshes.world.ranks[1][1]: is rank 4"},
      {"/meshes/world/ranks", "[[0,1],[2,-1]]", "meshes.world.ranks[1][1]"},
      {"/meshes/world/ranks", "[[],[]]", "has an empty dimension"},
      {"/meshes/world/ranks", "3", "meshes.world.ranks: is the number 3; expected a list"},
      {"/parameters", "{}", "parameters: is an object of 0 members; expected a list"},
      {"/parameters", "", "has no key 'parameters'"},
      {"/parameters/0", "1", "parameters[0]: is the number 1; expected an object"},
      {"/parameters/0/name", R"("")", "parameters[0].name"},
      {"/parameters/0/name", R"("a\u0000b")",
       "parameters[0].name: is the string 'a\\x00b'; expected a name without NUL"},
      {"/parameters/0/name", "", "parameters[0]: has no key 'name'"},
      {"/parameters/0/shape", "[8,-6]", "parameters[0].shape[1]: is the number -6; expected an integer >= 0"},
      {"/parameters/0/shape", "[4611686018427387904]", "parameters[0].shape: has too many elements"},
      {"/parameters/0/shape", "[4294967296,4294967296,0]", "parameters[0].shape: has too many elements"},
      {"/parameters/0/shape", "[18446744073709551615]", "parameters[0].shape[0]"},
      {"/parameters/0/shape", "8", "parameters[0].shape: is the number 8; expected a list"},
      {"/parameters/0/shape", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",
       "has 33 dimensions; expected at most 32"},
      {"/parameters/0/dtype", R"("int8")", "parameters[0].dtype: is the string 'int8'; expected one of float64"},
      {"/parameters/0/mesh", R"("gone")", "parameters[0] ('w'): names the mesh 'gone'"},
      {"/parameters/0/placements", R"j(["Shard(0)"])j",
       "has 1 placements; expected 2, one for each dimension of the mesh"},
      {"/parameters/0/placements", "", "has 0 placements"},
      {"/parameters/0/placements", R"j(["Shard(2)","Replicate()"])j", "parameters[0].placements[0]"},
      {"/parameters/0/placements", R"j(["_StridedShard(dim=0, sf=0)","Shard(0)"])j", "parameters[0].placements[0]"},
      {"/parameters/0/placements", R"j(["Interleaved(0)","Shard(0)"])j", "parameters[0].placements[0]"},
      {"/parameters/0/placements", R"j(["Flat()","Shard(0)"])j", "has Flat() before another placement"},
      {"/parameters/0/gradient_placements", R"j(["Partial()"])j", "has 1 gradient_placements"},
      {"/parameters/0/ranks", "[0,1]", "has ranks that are not those of its mesh 'world'"},
      {"/parameters/0/flat_ranges", R"({"0":[0,1]})", "has flat_ranges but no Flat() placement"},
      {"/parameters/0/model_part", "-1", "parameters[0].model_part"},
      {"/parameters/0/expert", R"("yes")", "parameters[0].expert"},
      {"/parameters/0/tied", "7", "parameters[0].tied"},
      {"/parameters/0/dataset", R"("a/b")", "parameters[0].dataset"},
      {"/parameters/0/dataset", R"(".")", "parameters[0].dataset"},
      {"/parameters/1/ranks", "", "parameters[1] ('norm'): has no mesh and no ranks"},
      {"/parameters/1/ranks", "[]", "has no mesh and no ranks"},
      {"/parameters/1/ranks", "[0,2,0]", "parameters[1].ranks: has rank 0 twice"},
      {"/parameters/1/ranks", "[0,4]", "names rank 4; expected ranks below the world size of 4"},
      {"/parameters/1/ranks", "[-1]", "parameters[1].ranks[0]"},
      {"/parameters/1/copies", R"("same")", "parameters[1].copies"},
      {"/parameters/1/placements", R"j(["Shard(0)"])j", "has placements but no mesh"},
      {"/parameters/1/name", R"("w")", "stands on rank 0 a second time, after parameters[0]"},
      {"/parameters/2/flat_ranges", R"({"0":[0,3]})", "has 1 flat_ranges; expected 2"},
      {"/parameters/2/flat_ranges", R"({"0":[0,3],"2":[3,5]})",
       "has a flat range for rank 2; expected ranks of its mesh 'moe'"},
      {"/parameters/2/flat_ranges", R"({"0":[0,3],"1":[3,6]})", "parameters[2].flat_ranges.1[1]"},
      {"/parameters/2/flat_ranges", R"({"0":[0,3],"1":[4,3]})", "parameters[2].flat_ranges.1[0]"},
      {"/parameters/2/flat_ranges", R"({"00":[0,3],"1":[3,5]})", "expected ranks as keys"},
      {"/parameters/2/flat_ranges", R"({"0":[0],"1":[3,5]})", "[begin, end]"},
      {"/training", "[]", "training: is a list of 0 elements; expected an object"},
      {"/training/max_grad_norm", R"("1.0")", "training.max_grad_norm: is the string '1.0'"},
      {"/training/max_grad_norm", "true", "training.max_grad_norm"},
      {"/training/pp_enabled", "1", "training.pp_enabled: is the number 1; expected true or false"},
      {"/training/dp_group_size", "2.5", "training.dp_group_size"},
      {"/files", R"({"rank_00000.h5":{}})", "files.rank_00000.h5: has no key 'bytes'"},
      {"/files", R"({"rank_00000.h5":{"bytes":-1}})", "files.rank_00000.h5.bytes"},
      {"/files", R"({"rank_00000.h5":{"bytes":1,"xxh3_64":"xyz"}})", "files.rank_00000.h5.xxh3_64"},
      {"/checksum", R"("0000000000000000")", "checksum: the content of the manifest has the checksum"},
      {"/checksum", R"("nothing")", "checksum: is the string 'nothing'; expected 16 hexadecimal digits"},
  };
  EXPECT_NO_THROW(parse(example()));
  for (const Mutation& mutation : mutations) {
    SCOPED_TRACE(std::string(mutation.pointer) + " = " + mutation.value);
    json root = example();
    const json::json_pointer pointer(mutation.pointer);
    if (*mutation.value == '\0') {
      root[pointer.parent_pointer()].erase(pointer.back());
    } else {
      root[pointer] = json::parse(mutation.value);
    }
    expect_error(ExitCode::bad_input, {"FILE", mutation.message}, [&] { parse(root); });
  }
}

TEST(Manifest, NamesAreAtMostFourKilobytes) {
  json root = example();
  root["parameters"][0]["name"] = std::string(4096, 'x');
  EXPECT_NO_THROW(parse(root));
  root["parameters"][0]["name"] = std::string(4097, 'x');
  expect_error(ExitCode::bad_input, {"parameters[0].name: is a name of 4097 bytes"}, [&] { parse(root); });
}

TEST(Manifest, AnotherVersionIsNamedBeforeItsParameters) {
  json root = example();
  root["version"] = 2;
  root["parameters"] = {"a string"};
  expect_error(ExitCode::bad_input, {"use a newer gradclip"}, [&] { parse(root); });
}

TEST(Manifest, OneNameMayStandOnDisjointRanksOnly) {
  json root = example();
  root["meshes"]["a"] = {{"dim_names", {"x"}}, {"ranks", {0, 1}}};
  root["meshes"]["b"] = {{"dim_names", {"x"}}, {"ranks", {2, 3}}};
  root["meshes"]["c"] = {{"dim_names", {"x"}}, {"ranks", {1, 2}}};
  const auto entry = [](const char* mesh) {
    return json{{"name", "emb"}, {"shape", {4}}, {"dtype", "float32"}, {"mesh", mesh}, {"placements", {"Shard(0)"}}};
  };
  root["parameters"] = {entry("a"), entry("b")};
  EXPECT_NO_THROW(parse(root));
  root["parameters"] = {entry("a"), entry("b"), entry("c")};
  expect_error(ExitCode::bad_input, {"'emb'", "stands on rank 1 a second time, after parameters[0]"},
               [&] { parse(root); });
  root["parameters"] = {entry("a"), entry("a")};
  expect_error(ExitCode::bad_input, {"a second time"}, [&] { parse(root); });
  root["parameters"][1]["dataset"] = "emb%401";
  EXPECT_EQ(parse(root).parameters[1].recorded_name(), "emb%401");
  EXPECT_EQ(parse(root).parameters[0].recorded_name(), "emb");
}

TEST(Manifest, ADatasetIsNotAnotherEntrysNameOnARank) {
  json root = example();
  root["meshes"]["a"] = {{"dim_names", {"x"}}, {"ranks", {0, 1}}};
  root["meshes"]["b"] = {{"dim_names", {"x"}}, {"ranks", {2, 3}}};
  const auto entry = [](const char* name, const char* mesh) {
    return json{{"name", name}, {"shape", {4}}, {"dtype", "float32"}, {"mesh", mesh}, {"placements", {"Shard(0)"}}};
  };
  root["parameters"] = {entry("p%25", "a"), entry("q", "a")};  // p%25's own dataset is p%2525
  root["parameters"][1]["dataset"] = "p%25";
  expect_error(ExitCode::bad_input,
               {"parameters[1] ('q')", "is called 'p%25' in /none and /packed/index of rank 0, as is parameters[0]"},
               [&] { parse(root); });
  root["parameters"][1]["mesh"] = "b";
  EXPECT_NO_THROW(parse(root));
}

TEST(Manifest, LinkNamesArePercentEncoded) {
  EXPECT_EQ(link_name("a.b"), "a.b");
  EXPECT_EQ(link_name("."), "%2E");
  EXPECT_EQ(link_name(".a/b%c."), "%2Ea%2Fb%25c.");
}

TEST(Manifest, RankFileNamesFollowThePattern) {
  json root = example();
  EXPECT_EQ(parse(root).rank_file_name(3), "rank_00003.h5");
  root["rank_file"] = "r{rank}";
  EXPECT_EQ(parse(root).rank_file_name(123456), "r123456");
  root["rank_file"] = "{rank:012d}.h5";
  EXPECT_EQ(parse(root).rank_file_name(7), "000000000007.h5");
}

TEST(Manifest, NumbersAreSpelledAsPythonSpellsThem) {
  EXPECT_EQ(json_number(1), "1.0");
  EXPECT_EQ(json_number(-0.0), "-0.0");
  EXPECT_EQ(json_number(0.0001), "0.0001");
  EXPECT_EQ(json_number(0.00001), "1e-05");
  EXPECT_EQ(json_number(1e15), "1000000000000000.0");
  EXPECT_EQ(json_number(1.5e16), "1.5e+16");
  EXPECT_EQ(json_number(3.2187), "3.2187");
  EXPECT_EQ(json_number(9007199254740993.0), "9007199254740992.0");
  EXPECT_EQ(json_number(5e-324), "5e-324");
  EXPECT_EQ(json_number(1.7976931348623157e308), "1.7976931348623157e+308");
  EXPECT_EQ(json_number(std::nan("")), "\"nan\"");
  EXPECT_EQ(json_number(-INFINITY), "\"-inf\"");
}

TEST(ReadManifest, SaysWhatADirectoryWithoutManifestIs) {
  const test::TemporaryDirectory directory;
  const auto refused = [&](const std::vector<std::string>& parts) {
    expect_error(ExitCode::bad_input, parts, [&] { static_cast<void>(read_manifest(directory.path())); });
  };
  refused({"has no manifest.json"});
  std::ofstream(directory / "rank_00000.h5") << "x";
  refused({"unfinished dump", "1 rank files"});
  std::ofstream(directory / "manifest.json.tmp") << "x";
  refused({"unfinished dump", "1 temporary files"});
  std::ofstream(directory / "rank_00000.json") << "{}";
  refused({"fragments of 1 ranks", "assemble"});
  expect_error(ExitCode::bad_input, {"does not exist"}, [&] { static_cast<void>(read_manifest(directory / "none")); });
  expect_error(ExitCode::bad_input, {"is not a directory"},
               [&] { static_cast<void>(read_manifest(directory / "rank_00000.h5")); });
  std::filesystem::create_directory(directory / kManifestName);
  refused({"is a directory; expected a regular file"});
}

TEST(ReadManifest, RefusesMoreThanOneGibibyteUnread) {
  const test::TemporaryDirectory directory;
  std::ofstream(directory / kManifestName) << "{}";
  std::filesystem::resize_file(directory / kManifestName, (std::uint64_t{1} << 30) + 1);
  expect_error(ExitCode::bad_input, {"has 1073741825 bytes; expected at most 1073741824"},
               [&] { static_cast<void>(read_manifest(directory.path())); });
}

TEST(RewrittenManifest, KeepsWhatItDoesNotChange) {
  const test::TemporaryDirectory directory;
  const std::string input =
      R"({"zeta": {"b": 1.50, "a": [1E2, 2]}, "state": "before_scale", "checksum": "00", "files": {"old": {"bytes": 1}},
             "format": "gradclip.dump"})";
  std::ofstream(directory / kManifestName) << input;
  const ManifestChanges changes{.state = GradientState::after_clip,
                                .files = {{"rank_00000.h5", {.bytes = 5, .xxh3_64 = 10}}},
                                .clip_record = R"({"total":1.0})"};
  Manifest read;
  read.text_checksum = xxh3_64(input.data(), input.size());
  const std::string text = rewritten_manifest(directory.path(), read, changes);
  EXPECT_NE(text.find(R"("zeta":{"b": 1.50, "a": [1E2, 2]})"), std::string::npos) << text;
  EXPECT_LT(text.find("zeta"), text.find("state"));
  const json root = json::parse(text);
  EXPECT_EQ(root["state"], "after_clip");
  EXPECT_EQ(root["clip"]["total"], 1.0);
  EXPECT_EQ(root["files"].dump(), R"({"rank_00000.h5":{"bytes":5,"xxh3_64":"000000000000000a"}})");
  const std::string hashed =
      R"({"clip":{"total":1.0},"files":{"rank_00000.h5":{"bytes":5,"xxh3_64":"000000000000000a"}},)"
      R"("format":"gradclip.dump","state":"after_clip","zeta":{"a":[1E2,2],"b":1.50}})";
  EXPECT_EQ(root["checksum"], checksum_text(xxh3_64(hashed.data(), hashed.size())));
}

TEST(RewrittenManifest, KnowsKeysThatAreSpelledWithEscapes) {
  const test::TemporaryDirectory directory;
  const std::string input = R"({"\u0063hecksum": "00", "st\u0061te": "before_scale", "zet\u0061": 1})";
  std::ofstream(directory / kManifestName) << input;
  Manifest read;
  read.text_checksum = xxh3_64(input.data(), input.size());
  const std::string text = rewritten_manifest(directory.path(), read, {.files = {}, .clip_record = "{}"});
  const json root = json::parse(text);
  EXPECT_EQ(root["state"], "after_clip");
  EXPECT_EQ(root.size(), 5U) << text;  // clip, files, checksum
  EXPECT_NE(text.find(R"("zet\u0061":1)"), std::string::npos) << "what is not changed stays as it is";
  EXPECT_EQ(text.find("before_scale"), std::string::npos) << text;
  EXPECT_EQ(text.find(R"("00")"), std::string::npos) << text;
}

TEST(RewrittenManifest, IsOfTheManifestThatWasRead) {
  const test::TemporaryDirectory directory;
  std::ofstream(directory / kManifestName) << example().dump();
  const Manifest read = read_manifest(directory.path());
  const ManifestChanges changes{.files = {}, .clip_record = "{}"};
  EXPECT_NO_THROW(static_cast<void>(rewritten_manifest(directory.path(), read, changes)));
  std::ofstream(directory / kManifestName, std::ios::app) << ' ';
  expect_error(ExitCode::bad_input, {"manifest.json", "was replaced while the dump was read", "that nobody changes"},
               [&] { static_cast<void>(rewritten_manifest(directory.path(), read, changes)); });
}

/// Half of the parameters on a mesh of all ranks, half on one of eight parts; shapes and names as real models have
/// them.
std::string large_manifest(std::int32_t ranks, int parameters) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  DumpBuilder dump("unused", ranks);
  dump.mesh("world", {"dp", "tp"}, {ranks / 8, 8}, all);
  for (int i = 0; i < 8; ++i) {
    dump.mesh("part" + std::to_string(i), {"x"}, {ranks / 8},
              {all.begin() + i * (ranks / 8), all.begin() + (i + 1) * (ranks / 8)});
  }
  for (int i = 0; i < parameters; ++i) {
    const bool part = i % 2 == 1;
    dump.parameter({.name = "model.layers." + std::to_string(part ? i / 16 : i) + ".self_attn.q_proj.weight",
                    .shape = {8192, 8192},
                    .dtype = "bfloat16",
                    .mesh = part ? "part" + std::to_string(i / 2 % 8) : "world",
                    .placements = part ? std::vector<std::string>{"Shard(0)"}
                                       : std::vector<std::string>{"_StridedShard(dim=0, sf=8)", "Shard(0)"},
                    .dataset = part ? "part" + std::to_string(i / 16) : ""});
  }
  return dump.manifest_text();
}

struct Cost {
  double allocations, peak_bytes;
};

Cost cost_of_parsing(std::int32_t ranks, int parameters) {
  const std::string text = large_manifest(ranks, parameters);
  const test::Allocations allocations;
  const Manifest manifest = parse_manifest(text, "FILE");
  EXPECT_EQ(manifest.parameters.size(), static_cast<std::size_t>(parameters));
  return {static_cast<double>(allocations.count()), static_cast<double>(allocations.peak_bytes())};
}

TEST(Manifest, CostsAsMuchAsItsParametersAndItsRanksNeverTheirProduct) {
  const Cost small = cost_of_parsing(64, 2000);
  const Cost parameters = cost_of_parsing(64, 16'000);
  const Cost ranks = cost_of_parsing(4096, 2000);
  EXPECT_LT(parameters.allocations, 8.5 * small.allocations);
  EXPECT_LT(parameters.peak_bytes, 8.5 * small.peak_bytes);
  EXPECT_LT(parameters.peak_bytes, 16'000 * 5000.0);  // 500 MB at 100,000 parameters
  // The meshes' lists and the files' entries grow with the ranks; a product would be 8 million.
  EXPECT_LT(ranks.allocations - small.allocations, 4096 * 16.0);
  EXPECT_LT(ranks.peak_bytes - small.peak_bytes, 4096 * 2000.0);
}

}  // namespace
}  // namespace gradclip
