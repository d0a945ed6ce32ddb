#include "gradclip/dump/rank_file.hpp"

#include <gtest/gtest.h>
#include <hdf5.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "dump_builder.hpp"
#include "expect_error.hpp"
#include "file_content.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/dump_reader.hpp"

namespace gradclip {
namespace {

using test::decode;
using test::DumpBuilder;
using test::expect_error;
using test::Spelling;
using test::StorageSpec;
using test::TemporaryDirectory;

std::vector<double> counting(std::size_t count, double first = 0) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = first + static_cast<double>(i);
  return values;
}

std::vector<double> read_all(const RankFile& file, std::size_t parameter) {
  const StoredShard& shard = file.locate(parameter);
  std::vector<std::byte> bytes(shard.elements * size_of(shard.dtype));
  file.read(shard, 0, shard.elements, bytes.data());
  return decode(std::string(name(shard.dtype)), bytes);
}

std::vector<std::int64_t> labels_of(const RankFile& file, std::size_t microbatch) {
  std::vector<std::int64_t> labels(file.labels().at(microbatch).elements());
  file.read_labels(microbatch, 0, labels.size(), labels.data());
  return labels;
}

/// Two ranks; every type, empty shards, scalars, None, a plain tensor, several model parts.
DumpBuilder many_kinds(const std::filesystem::path& directory) {
  DumpBuilder dump(directory, 2);
  dump.mesh("tp", {"tp"}, {2}, {0, 1});
  for (const char* dtype : {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}) {
    dump.parameter(
        {.name = std::string("w.") + dtype, .shape = {3, 4}, .dtype = dtype, .mesh = "tp", .placements = {"Shard(0)"}});
    dump.tensor(std::string("w.") + dtype, {0, 1, 2, 3, -4, 0.5, 6, 7, 8, -0.25, 10, 12});
  }
  dump.parameter({.name = "one", .shape = {1, 5}, .mesh = "tp", .placements = {"Shard(0)"}}).tensor("one", counting(5));
  dump.parameter({.name = "scalar", .shape = {}, .dtype = "float64"}).tensor("scalar", {3.25});
  dump.parameter({.name = "none", .shape = {2}}).local(0, "none", {1, 2}).none(1, "none");
  dump.parameter({.name = "odd/./%name.", .shape = {2}}).tensor("odd/./%name.", {5, 6});
  dump.parameter({.name = ".hidden", .shape = {1}}).tensor(".hidden", {7});
  dump.scale_inv(0, "w.float8_e4m3fn", 0.5F);
  dump.labels(0, 2, 3, {1, 2, 3, 4, 5, -100}).labels(0, 1, 2, {7, 8});
  return dump;
}

void expect_many_kinds(const std::filesystem::path& directory) {
  DumpReader dump(directory);
  const auto first = dump.rank_file(0);
  const auto second = dump.rank_file(1);
  for (std::size_t p = 0; p < 6; ++p) {
    SCOPED_TRACE(dump.manifest().parameters[p].name);
    EXPECT_EQ(read_all(*first, p), (std::vector<double>{0, 1, 2, 3, -4, 0.5, 6, 7}));
    EXPECT_EQ(read_all(*second, p), (std::vector<double>{8, -0.25, 10, 12}));
    EXPECT_EQ(second->locate(p).layout.offset(), (std::vector<std::int64_t>{2, 0}));
  }
  EXPECT_EQ(read_all(*first, 6), counting(5));
  EXPECT_EQ(second->locate(6).elements, 0u);
  EXPECT_EQ(read_all(*second, 6), std::vector<double>{});
  EXPECT_EQ(read_all(*second, 7), std::vector<double>{3.25});
  EXPECT_EQ(read_all(*first, 8), (std::vector<double>{1, 2}));
  EXPECT_TRUE(second->locate(8).none);
  EXPECT_EQ(read_all(*second, 9), (std::vector<double>{5, 6}));
  EXPECT_EQ(read_all(*first, 10), std::vector<double>{7});
  EXPECT_EQ(first->locate(4).scale_inv, 0.5F);
  EXPECT_FALSE(second->locate(4).scale_inv);
  const auto labels = first->labels();
  ASSERT_EQ(labels.size(), 2u);
  EXPECT_EQ(labels[0].batch, 2);
  EXPECT_EQ(labels[0].sequence, 3);
  EXPECT_EQ(labels[1].elements(), 2u);
  EXPECT_EQ(labels_of(*first, 0), (std::vector<std::int64_t>{1, 2, 3, 4, 5, -100}));
  EXPECT_EQ(labels_of(*first, 1), (std::vector<std::int64_t>{7, 8}));
  std::vector<std::int64_t> part(3);
  first->read_labels(0, 2, part.size(), part.data());
  EXPECT_EQ(part, (std::vector<std::int64_t>{3, 4, 5}));
  EXPECT_TRUE(second->labels().empty());
}

TEST(RankFile, EveryLayoutFilterAndSpellingHoldsTheSameValues) {
  const StorageSpec contiguous;
  StorageSpec plain_chunks{.chunk = {2, 3}};
  StorageSpec deflated{.chunk = {2, 3}, .deflate = 6};
  StorageSpec all_filters{.chunk = {1, 3}, .deflate = 1, .shuffle = true, .fletcher32 = true};
  StorageSpec custom{.spelling = Spelling::custom_float, .checksums = false, .recorded_slices = false};
  StorageSpec opaque{.spelling = Spelling::opaque, .variable_strings = true};
  StorageSpec packed{.packed = true};
  StorageSpec packed_variable{.packed = true, .variable_strings = true};
  StorageSpec packed_deflated{.packed = true, .chunk = {16}, .deflate = 6, .shuffle = true};
  int i = 0;
  for (const StorageSpec& storage :
       {contiguous, plain_chunks, deflated, all_filters, custom, opaque, packed, packed_variable, packed_deflated}) {
    SCOPED_TRACE(i++);
    const TemporaryDirectory directory;
    expect_many_kinds(many_kinds(directory.path()).storage(storage).write());
    EXPECT_EQ(DumpReader(directory.path()).rank_file(0)->packed(), storage.packed);
  }
}

TEST(RankFile, Bfloat16IsTheSameInEverySpelling) {
  for (const Spelling spelling : {Spelling::raw_bits, Spelling::custom_float, Spelling::opaque}) {
    const TemporaryDirectory directory;
    DumpBuilder dump(directory.path(), 1);
    dump.parameter({.name = "w", .shape = {2}, .dtype = "bfloat16"}).tensor("w", {1.1640625, -1.1640625});
    dump.storage({.spelling = spelling}).write();
    DumpReader reader(directory.path());
    const auto file = reader.rank_file(0);
    std::uint16_t bits[2];
    file->read(file->locate(0), 0, 2, reinterpret_cast<std::byte*>(bits));
    EXPECT_EQ(bits[0], 0x3F95);
    EXPECT_EQ(bits[1], 0xBF95);
  }
}

TEST(RankFile, AnyRangeAndAnyPiecesReadTheSame) {
  for (const StorageSpec& storage :
       {StorageSpec{}, StorageSpec{.packed = true}, StorageSpec{.chunk = {2, 3, 2}, .deflate = 4, .shuffle = true}}) {
    const TemporaryDirectory directory;
    DumpBuilder dump(directory.path(), 1);
    dump.parameter({.name = "a", .shape = {3, 5, 4}}).tensor("a", counting(60));
    dump.parameter({.name = "b", .shape = {40'000}}).tensor("b", counting(40'000, 100));
    dump.parameter({.name = "c", .shape = {3}, .dtype = "float64"}).tensor("c", {1, 2, 3});
    DumpReader reader(dump.storage(storage).write());
    const auto file = reader.rank_file(0);
    const StoredShard& a = file->locate(0);
    for (std::uint64_t first = 0; first < 60; first += 7) {
      for (std::uint64_t count = 0; first + count <= 60; count += 5) {
        std::vector<float> values(count);
        file->read(a, first, count, reinterpret_cast<std::byte*>(values.data()));
        for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(values[i], static_cast<float>(first + i));
      }
    }
    std::vector<float> values(60 + 40'000);
    std::vector<double> doubles(3);
    const auto at = [](auto* data) { return reinterpret_cast<std::byte*>(data); };
    file->read({{&a, 0, 25, at(values.data())},
                {&a, 30, 30, at(values.data() + 30)},
                {&a, 25, 5, at(values.data() + 25)},
                {&a, 0, 0, nullptr},
                {&file->locate(1), 0, 40'000, at(values.data() + 60)},
                {&file->locate(2), 0, 3, at(doubles.data())}});
    for (std::size_t i = 0; i < 60; ++i) ASSERT_EQ(values[i], static_cast<float>(i));
    for (std::size_t i = 0; i < 40'000; ++i) ASSERT_EQ(values[60 + i], static_cast<float>(100 + i));
    EXPECT_EQ(doubles, (std::vector<double>{1, 2, 3}));
  }
}

TEST(RankFile, SeveralThreadsReadAndLocateAtOnce) {
  const TemporaryDirectory directory;
  DumpBuilder dump(directory.path(), 1);
  for (int p = 0; p < 20; ++p) {
    dump.parameter({.name = "w" + std::to_string(p), .shape = {30, 30}});
    dump.tensor("w" + std::to_string(p), counting(900, p));
  }
  DumpReader reader(dump.storage({.chunk = {7, 9}, .deflate = 3}).write());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&reader] {
      const auto file = reader.rank_file(0);
      for (std::size_t p = 0; p < 20; ++p) EXPECT_EQ(read_all(*file, p), counting(900, static_cast<double>(p)));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- what is refused

DumpBuilder simple(const std::filesystem::path& directory) {
  DumpBuilder dump(directory, 2);
  dump.mesh("tp", {"tp"}, {2}, {0, 1});
  dump.parameter({.name = "w", .shape = {4, 2}, .mesh = "tp", .placements = {"Shard(0)"}}).tensor("w", counting(8));
  return dump;
}

/// Locates and reads everything on every rank.
void read_everything(const std::filesystem::path& directory) {
  DumpReader reader(directory);
  for (std::int32_t rank = 0; rank < reader.manifest().world_size; ++rank) {
    const auto file = reader.rank_file(rank);
    for (std::size_t p = 0; p < reader.manifest().parameters.size(); ++p) {
      if (reader.manifest().holds(reader.manifest().parameters[p], rank) && !file->locate(p).none) read_all(*file, p);
    }
    for (std::size_t k = 0; k < file->labels().size(); ++k) labels_of(*file, k);
  }
}

/// A simple dump whose rank 1 file `change` has changed by HDF5's own means.
void expect_refused(const std::vector<std::string>& parts, const std::function<void(hid_t file)>& change,
                    const StorageSpec& storage = {}) {
  const TemporaryDirectory directory;
  simple(directory.path()).storage(storage).write();
  const std::string path = directory / "rank_00001.h5";
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  ASSERT_GE(file, 0);
  change(file);
  H5Fclose(file);
  expect_error(ExitCode::bad_input, parts, [&] { read_everything(directory.path()); });
}

void replace_dataset(hid_t file, hid_t type, const std::vector<hsize_t>& shape, hid_t properties = H5P_DEFAULT) {
  H5Ldelete(file, "gradients/w", H5P_DEFAULT);
  const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
  const hid_t dataset = H5Dcreate2(file, "gradients/w", type, space, H5P_DEFAULT, properties, H5P_DEFAULT);
  ASSERT_GE(dataset, 0);
  H5Dclose(dataset);
  H5Sclose(space);
}

void set_integers(hid_t file, const char* object, const char* name, const std::vector<std::int64_t>& values,
                  const std::vector<hsize_t>& shape) {
  const hid_t target = H5Oopen(file, object, H5P_DEFAULT);
  H5Adelete(target, name);
  const hid_t space =
      shape.empty() ? H5Screate(H5S_SCALAR) : H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
  const hid_t attribute = H5Acreate2(target, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
  H5Awrite(attribute, H5T_NATIVE_INT64, values.data());
  H5Aclose(attribute);
  H5Sclose(space);
  H5Oclose(target);
}

TEST(RankFile, RootAttributesMustBeThisFiles) {
  expect_refused({"rank_00001.h5", "attribute 'rank' is 0; expected 1"},
                 [](hid_t file) { set_integers(file, ".", "rank", {0}, {}); });
  expect_refused({"'world_size' is 3; expected 2"}, [](hid_t file) { set_integers(file, ".", "world_size", {3}, {}); });
  expect_refused({"'step' is 2; expected 1"}, [](hid_t file) { set_integers(file, ".", "step", {2}, {}); });
  expect_refused({"'version' is a list"}, [](hid_t file) { set_integers(file, ".", "version", {1, 1}, {2}); });
  expect_refused({"'rank' is missing"}, [](hid_t file) { H5Adelete(file, "rank"); });
  expect_refused({"'format' is missing"}, [](hid_t file) { H5Adelete(file, "format"); });
  expect_refused({"attribute 'format'", "expected one string"},
                 [](hid_t file) { set_integers(file, ".", "format", {1}, {}); });
}

TEST(RankFile, MissingGradientsAreErrorsThatNameEverything) {
  expect_refused({"rank_00001.h5", "/gradients/w", "parameter 'w'", "rank 1", "is missing, and is not listed in /none"},
                 [](hid_t file) { H5Ldelete(file, "gradients/w", H5P_DEFAULT); });
  expect_refused({"is missing"}, [](hid_t file) { H5Ldelete(file, "gradients", H5P_DEFAULT); });
  const TemporaryDirectory directory;
  DumpBuilder dump = simple(directory.path());
  dump.parameter({.name = "x", .shape = {1}, .ranks = {1}, .dataset = "w2"}).none(1, "x").write();
  read_everything(directory.path());
}

TEST(RankFile, AGradientThatIsNoneTooIsRefused) {
  const TemporaryDirectory directory;
  simple(directory.path()).none(1, "w").write();
  const hid_t source = H5Fopen((directory / "rank_00000.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t target = H5Fopen((directory / "rank_00001.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  H5Ocopy(source, "gradients/w", target, "gradients/w", H5P_DEFAULT, H5P_DEFAULT);
  H5Fclose(source);
  H5Fclose(target);
  expect_error(ExitCode::bad_input, {"is listed in /none too"}, [&] { read_everything(directory.path()); });
}

TEST(RankFile, WrongShapesShowBothAndWhereTheyComeFrom) {
  expect_refused({"has the shape [2, 3]; expected [2, 2] ([4, 2] as [Shard(0)] on mesh 'tp' at coordinate [1])"},
                 [](hid_t file) {
                   replace_dataset(file, H5T_IEEE_F32LE, {2, 3});
                 });
  expect_refused({"has the shape [4]; expected [2, 2]"},
                 [](hid_t file) { replace_dataset(file, H5T_IEEE_F32LE, {4}); });
}

TEST(RankFile, WrongTypesAreNamed) {
  const auto refused = [](hid_t type, const std::vector<std::string>& parts) {
    expect_refused(parts, [&](hid_t file) { replace_dataset(file, type, {2, 2}); });
  };
  refused(H5T_IEEE_F64LE, {"is of type float64; expected float32 (by the manifest)"});
  refused(H5T_STD_U16LE, {"is of type bfloat16; expected float32"});
  refused(H5T_IEEE_F32BE, {"32-bit big-endian float"});
  refused(H5T_STD_I32LE, {"32-bit little-endian signed integer"});
  refused(H5T_STD_U32LE, {"32-bit little-endian unsigned integer"});
  refused(H5T_STD_I16LE, {"16-bit little-endian signed integer"});
  refused(H5T_STD_U16BE, {"16-bit big-endian unsigned integer"});
  refused(H5T_STD_U8LE, {"8-bit unsigned integer without the attribute dtype"});
  const hid_t opaque = H5Tcreate(H5T_OPAQUE, 4);
  refused(opaque, {"4 opaque bytes without the attribute dtype"});
  const hid_t e4m3 = H5Tcopy(H5T_IEEE_F32LE);
  H5Tset_fields(e4m3, 7, 3, 4, 0, 3);
  H5Tset_precision(e4m3, 8);
  H5Tset_size(e4m3, 1);
  H5Tset_ebias(e4m3, 7);
  refused(e4m3, {"8-bit float (exponent 4, mantissa 3 bits)"});
  const hid_t biased = H5Tcopy(H5T_IEEE_F32LE);
  H5Tset_ebias(biased, 126);
  refused(biased, {"32-bit little-endian float"});
  const hid_t compound = H5Tcreate(H5T_COMPOUND, 4);
  H5Tinsert(compound, "x", 0, H5T_IEEE_F32LE);
  refused(compound, {"compound"});
}

TEST(RankFile, TheDtypeAttributeMustAgree) {
  const auto retag = [](const char* text) {
    return [text](hid_t file) {
      const hid_t dataset = H5Dopen2(file, "gradients/w", H5P_DEFAULT);
      H5Adelete(dataset, "dtype");
      const hid_t type = H5Tcopy(H5T_C_S1);
      H5Tset_size(type, std::strlen(text));
      const hid_t space = H5Screate(H5S_SCALAR);
      const hid_t attribute = H5Acreate2(dataset, "dtype", type, space, H5P_DEFAULT, H5P_DEFAULT);
      H5Awrite(attribute, type, text);
      H5Aclose(attribute);
      H5Dclose(dataset);
    };
  };
  expect_refused({"with the attribute dtype 'bfloat16'"}, retag("bfloat16"));
  expect_refused({"the attribute 'dtype' is 'int4'; expected one of float64"}, retag("int4"));
}

TEST(RankFile, ARecordedOffsetMustAgreeWithThePlacements) {
  expect_refused({"its global_offset is [0, 0]; expected [2, 0] ([4, 2] as [Shard(0)] on mesh 'tp' at coordinate [1])"},
                 [](hid_t file) {
                   set_integers(file, "gradients/w", "global_offset", {0, 0}, {2});
                 });
  expect_refused({"its global_offset is [2]"},
                 [](hid_t file) { set_integers(file, "gradients/w", "global_offset", {2}, {1}); });
  expect_refused({"global_ranges are not of the shape [n, 3]"}, [](hid_t file) {
    set_integers(file, "gradients/w", "global_ranges", {0, 1, 2}, {3});
  });
  expect_refused({"[0, 3)"}, [](hid_t file) {
    set_integers(file, "gradients/w", "global_ranges", {0, 1, 2, 1, 0, 3}, {2, 3});
  });
  expect_refused({"has the shape [2, 2]; expected [1, 2] (its global_ranges)"}, [](hid_t file) {
    set_integers(file, "gradients/w", "global_ranges", {0, 1, 2, 1, 0, 2}, {2, 3});
  });
}

TEST(RankFile, RecordedRangesWinOverThePlacements) {
  const TemporaryDirectory directory;
  simple(directory.path()).write();
  const hid_t file = H5Fopen((directory / "rank_00001.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  set_integers(file, "gradients/w", "global_ranges", {0, 0, 1, 0, 3, 4, 1, 0, 2}, {3, 3});
  H5Fclose(file);
  DumpReader reader(directory.path());
  const auto rank_file = reader.rank_file(1);
  EXPECT_EQ(rank_file->locate(0).layout.global_index(2), (std::vector<std::int64_t>{3, 0}));
}

TEST(RankFile, UnevenStridedShardsFollowTheRecordedOffset) {
  const TemporaryDirectory directory;
  DumpBuilder dump(directory.path(), 4);
  dump.mesh("m", {"dp", "tp"}, {2, 2}, {0, 1, 2, 3});
  dump.parameter({.name = "w", .shape = {5}, .mesh = "m", .placements = {"_StridedShard(dim=0, sf=2)", "Shard(0)"}});
  for (std::int32_t rank = 0; rank < 4; ++rank) dump.local(rank, "w", {1}, std::vector<std::int64_t>{1});
  dump.storage({.recorded_slices = false}).write();
  const hid_t file = H5Fopen((directory / "rank_00003.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  set_integers(file, "gradients/w", "global_offset", {4}, {1});
  H5Fclose(file);
  DumpReader reader(directory.path());
  EXPECT_EQ(reader.rank_file(3)->locate(0).layout.offset(), std::vector<std::int64_t>{4});
  expect_error(ExitCode::bad_input, {"has the shape [1]; expected [2]"},
               [&] { static_cast<void>(reader.rank_file(0)->locate(0)); });
}

TEST(RankFile, ScaleInvIsForFloat8Only) {
  const TemporaryDirectory directory;
  simple(directory.path()).scale_inv(1, "w", 2.0F).write();
  expect_error(ExitCode::bad_input, {"has a scale_inv although it is of type float32"},
               [&] { read_everything(directory.path()); });
}

TEST(RankFile, LinksAndStorageThatLeaveTheFileAreRefused) {
  expect_refused({"/gradients/w", "is a soft link"}, [](hid_t file) {
    H5Lmove(file, "gradients/w", file, "gradients/other", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/gradients/other", file, "gradients/w", H5P_DEFAULT, H5P_DEFAULT);
  });
  expect_refused({"/gradients/w", "is an external link"}, [](hid_t file) {
    H5Ldelete(file, "gradients/w", H5P_DEFAULT);
    H5Lcreate_external("rank_00000.h5", "/gradients/w", file, "gradients/w", H5P_DEFAULT, H5P_DEFAULT);
  });
  expect_refused({"/gradients", "is a soft link"}, [](hid_t file) {
    H5Lmove(file, "gradients", file, "other", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/other", file, "gradients", H5P_DEFAULT, H5P_DEFAULT);
  });
  expect_refused({"the object has 2 names in the file"}, [](hid_t file) {
    H5Lcreate_hard(file, "gradients/w", file, "gradients/again", H5P_DEFAULT, H5P_DEFAULT);
  });
  expect_refused({"keeps its data in an external file"}, [](hid_t file) {
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_external(properties, "/etc/passwd", 0, 16);
    replace_dataset(file, H5T_IEEE_F32LE, {2, 2}, properties);
  });
  expect_refused({"is a virtual dataset"}, [](hid_t file) {
    const hsize_t shape[2] = {2, 2};
    const hid_t space = H5Screate_simple(2, shape, nullptr);
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_virtual(properties, space, "rank_00000.h5", "/gradients/w", space);
    replace_dataset(file, H5T_IEEE_F32LE, {2, 2}, properties);
  });
  expect_refused({"is not a dataset"}, [](hid_t file) {
    H5Ldelete(file, "gradients/w", H5P_DEFAULT);
    H5Gclose(H5Gcreate2(file, "gradients/w", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  });
  expect_refused({"/gradients", "is not a group"}, [](hid_t file) {
    H5Lmove(file, "gradients/w", file, "w", H5P_DEFAULT, H5P_DEFAULT);
    H5Ldelete(file, "gradients", H5P_DEFAULT);
    H5Lmove(file, "w", file, "gradients", H5P_DEFAULT, H5P_DEFAULT);
  });
  expect_refused({"has both /gradients and /packed"},
                 [](hid_t file) { H5Gclose(H5Gcreate2(file, "packed", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)); });
}

/// The library makes no such dataset, and would refuse to make its copy: damage of the input, not a full disk.
TEST(RankFile, AContiguousDatasetThatMayGrowIsDamaged) {
  const TemporaryDirectory directory;
  DumpBuilder dump(directory.path(), 1);
  dump.parameter({.name = "w", .shape = {4099}, .dtype = "float64"}).tensor("w", counting(4099)).write();
  EXPECT_NO_THROW(read_all(*DumpReader(directory.path()).rank_file(0), 0));
  const auto path = directory / "rank_00000.h5";
  std::string bytes;
  {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    bytes = text.str();
  }
  const std::string size("\x03\x10\0\0\0\0\0\0", 8);  // 4099, as shape and as largest shape
  const std::size_t at = bytes.find(size + size);
  ASSERT_NE(at, std::string::npos);
  for (const std::string& largest : {std::string(8, '\xff'), std::string("\x03\x11\0\0\0\0\0\0", 8)}) {
    bytes.replace(at + size.size(), size.size(), largest);
    std::ofstream(path, std::ios::binary) << bytes;
    expect_error(ExitCode::bad_input, {"rank_00000.h5", "/gradients/w", "may grow in dimension 0", "damaged"},
                 [&] { read_all(*DumpReader(directory.path()).rank_file(0), 0); });
  }
}

TEST(RankFile, DataThatWasNeverWrittenIsRefused) {
  expect_refused({"0 of its 16 bytes were written"}, [](hid_t file) { replace_dataset(file, H5T_IEEE_F32LE, {2, 2}); });
  expect_refused({"0 of its 4 chunks were written"}, [](hid_t file) {
    const hsize_t chunk[2] = {1, 1};
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(properties, 2, chunk);
    replace_dataset(file, H5T_IEEE_F32LE, {2, 2}, properties);
  });
  expect_refused({"has no elements at all (a null dataspace)"}, [](hid_t file) {
    H5Ldelete(file, "gradients/w", H5P_DEFAULT);
    const hid_t space = H5Screate(H5S_NULL);
    H5Dclose(H5Dcreate2(file, "gradients/w", H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  });
}

TEST(RankFile, AMissingFilterIsNamedWithAdvice) {
  expect_refused({"needs the HDF5 filter 32015", "HDF5_PLUGIN_PATH"}, [](hid_t file) {
    const hsize_t chunk[2] = {2, 2};
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(properties, 2, chunk);
    H5Pset_filter(properties, 32015, H5Z_FLAG_OPTIONAL, 0, nullptr);
    replace_dataset(file, H5T_IEEE_F32LE, {2, 2}, properties);
  });
}

/// Replaces rank 1's only chunk, as it is stored, by other bytes.
std::function<void(hid_t)> replace_chunk(std::vector<unsigned char> stored, unsigned skipped_filters = 0) {
  return [stored = std::move(stored), skipped_filters](hid_t file) {
    const hid_t dataset = H5Dopen2(file, "gradients/w", H5P_DEFAULT);
    const hsize_t origin[2] = {0, 0};
    ASSERT_GE(H5Dwrite_chunk(dataset, H5P_DEFAULT, skipped_filters, origin, stored.size(), stored.data()), 0);
    H5Dclose(dataset);
  };
}

TEST(RankFile, DamagedChunksAreRefusedByName) {
  const StorageSpec deflated{.chunk = {2}, .deflate = 6};
  // zlib streams of 4,096 and of 8 zero bytes; the chunk declares 16
  const std::vector<unsigned char> long_stream{0x78, 0x9c, 0xed, 0xc1, 0x31, 0x01, 0x00, 0x00, 0x00, 0xc2, 0xa0,
                                               0xf5, 0x4f, 0x6d, 0x0d, 0x0f, 0xa0, 0x00, 0x00, 0x00, 0x00, 0x00,
                                               0x00, 0x00, 0x80, 0x77, 0x03, 0x10, 0x00, 0x00, 0x01};
  const std::vector<unsigned char> short_stream{0x78, 0x9c, 0x63, 0x60, 0x80, 0x00, 0x00, 0x00, 0x08, 0x00, 0x01};
  expect_refused({"/gradients/w", "inflates beyond its declared size; expected 16 bytes"}, replace_chunk(long_stream),
                 deflated);
  expect_refused({"inflates to 8 bytes; expected its declared size of 16"}, replace_chunk(short_stream), deflated);
  expect_refused({"deflate stream is damaged"}, replace_chunk({1, 2, 3, 4, 5}), deflated);
  expect_refused({"holds 15 bytes; expected its declared size of 16"}, replace_chunk(std::vector<unsigned char>(15), 1),
                 deflated);
  const StorageSpec summed{.chunk = {2}, .fletcher32 = true};
  expect_refused({"does not match its fletcher32"}, replace_chunk(std::vector<unsigned char>(20, 1)), summed);
  expect_refused({"shorter than its fletcher32"}, replace_chunk({1, 2}), summed);
}

TEST(RankFile, PackedPartsMustLieWithinTheirDataset) {
  const auto with_index = [](const std::string& index) {
    return [index](hid_t file) {
      H5Ldelete(file, "packed/index", H5P_DEFAULT);
      const hid_t type = H5Tcopy(H5T_C_S1);
      H5Tset_size(type, index.size());
      const hid_t space = H5Screate(H5S_SCALAR);
      const hid_t dataset = H5Dcreate2(file, "packed/index", type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
      H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, index.c_str());
      H5Dclose(dataset);
    };
  };
  const StorageSpec packed{.packed = true};
  expect_refused({"/packed/index", "w.offset", "multiple of 64 bytes"},
                 with_index(R"({"w":{"dtype":"float32","offset":1,"shape":[2,2]}})"), packed);
  expect_refused({"elements 16 to 20 of /packed/float32, which has 4"},
                 with_index(R"({"w":{"dtype":"float32","offset":16,"shape":[2,2]}})"), packed);
  expect_refused({"w.offset"}, with_index(R"({"w":{"dtype":"float32","offset":-16,"shape":[2,2]}})"), packed);
  expect_refused({"too many elements"},
                 with_index(R"({"w":{"dtype":"float32","offset":0,"shape":[4294967296,4294967296]}})"), packed);
  expect_refused({"overlap"},
                 with_index(R"({"w":{"dtype":"float32","offset":0,"shape":[2,2]},)"
                            R"("v":{"dtype":"float32","offset":0,"shape":[1]}})"),
                 packed);
  expect_refused({"is missing"}, with_index("{}"), packed);
  expect_refused({"has the shape [4]; expected [2, 2]"},
                 with_index(R"({"w":{"dtype":"float32","offset":0,"shape":[4]}})"), packed);
  expect_refused({"not well-formed"}, with_index("{\"w\":"), packed);
  expect_refused({"is of type float64; expected float32"},
                 with_index(R"({"w":{"dtype":"float64","offset":0,"shape":[2,2]}})"), packed);
  expect_refused(
      {"/packed/float32", "does not exist"}, [](hid_t file) { H5Ldelete(file, "packed/float32", H5P_DEFAULT); },
      packed);
}

TEST(RankFile, LabelsMustBeInt64InTwoDimensions) {
  const auto add = [](hid_t type, std::vector<hsize_t> shape, const char* link) {
    return [=](hid_t file) {
      const hid_t group = H5Gcreate2(file, "labels", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
      const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
      const hid_t dataset = H5Dcreate2(group, link, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
      H5Dclose(dataset);
      H5Gclose(group);
    };
  };
  expect_refused({"/labels/0", "32-bit little-endian signed integer; expected little-endian int64 [batch, sequence]"},
                 add(H5T_STD_I32LE, {1, 1}, "0"));
  expect_refused({"/labels/0", "has 1 dimensions"}, add(H5T_STD_I64LE, {1}, "0"));
  expect_refused({"/labels/0", "does not exist"}, add(H5T_STD_I64LE, {1, 1}, "7"));
  expect_refused({"/labels/0", "more than 2^31"}, add(H5T_STD_I64LE, {1u << 20, 1u << 20}, "0"));
}

TEST(RankFile, FilesMustBeRegularAndInTheDump) {
  const TemporaryDirectory directory;
  const TemporaryDirectory elsewhere;
  simple(directory.path()).write();
  const auto refused = [&](const std::vector<std::string>& parts) {
    expect_error(ExitCode::bad_input, parts, [&] { read_everything(directory.path()); });
  };
  std::filesystem::rename(directory / "rank_00001.h5", elsewhere / "f.h5");
  refused({"rank_00001.h5", "does not exist (the file of rank 1)"});
  std::filesystem::create_symlink(elsewhere / "f.h5", directory / "rank_00001.h5");
  refused({"is a link out of the dump"});
  std::filesystem::remove(directory / "rank_00001.h5");
  std::filesystem::create_directory(directory / "rank_00001.h5");
  refused({"is a directory; expected a regular file"});
  std::filesystem::remove(directory / "rank_00001.h5");
  std::ofstream(directory / "rank_00001.h5") << "not HDF5";
  refused({"cannot be opened as an HDF5 file: file signature not found"});
  std::filesystem::remove(directory / "rank_00001.h5");
  std::filesystem::rename(elsewhere / "f.h5", directory / "data.h5");
  std::filesystem::create_symlink("data.h5", directory / "rank_00001.h5");
  EXPECT_NO_THROW(read_everything(directory.path()));  // a link within the dump
}

TEST(RankFile, TruncatedFilesAreErrorsAtEveryLength) {
  const TemporaryDirectory directory;
  many_kinds(directory.path()).write();
  const auto path = directory / "rank_00001.h5";
  const auto size = std::filesystem::file_size(path);
  for (auto length = size - 1;; length = length * 3 / 4) {
    SCOPED_TRACE(length);
    std::filesystem::resize_file(path, length);
    expect_error(ExitCode::bad_input, {"rank_00001.h5"}, [&] { read_everything(directory.path()); });
    if (length == 0) break;
  }
}

TEST(RankFile, AFileCutWhileItIsReadIsAnError) {
  const TemporaryDirectory directory;
  DumpBuilder dump(directory.path(), 1);
  dump.parameter({.name = "w", .shape = {4000}}).tensor("w", counting(4000));
  DumpReader reader(dump.write());
  const auto file = reader.rank_file(0);
  const StoredShard& shard = file->locate(0);
  std::filesystem::resize_file(file->path(), *shard.file_offset + 100);
  std::vector<std::byte> bytes(16'000);
  expect_error(ExitCode::bad_input, {"rank_00000.h5", "ends at byte", "changed while it was read"},
               [&] { file->read(shard, 0, 4000, bytes.data()); });
}

TEST(RankFile, FlippedBytesOfMetadataEndInAnAnswerOrAnError) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the HDF5 library (1.10.8) itself reads freed memory for some damaged object headers";
#endif
  const TemporaryDirectory directory;
  simple(directory.path()).write();
  const std::string path = directory / "rank_00001.h5";
  const std::string content = test::file_content(path);
  for (std::size_t at = 0; at < content.size(); at += 7) {
    std::string changed = content;
    changed[at] = static_cast<char>(changed[at] ^ 0x55);
    std::ofstream(path, std::ios::binary) << changed;
    try {
      read_everything(directory.path());
    } catch (const Error& error) {
      EXPECT_NE(error.code(), ExitCode::bug) << error.what();
    }
  }
}

TEST(DumpReader, KeepsFilesOpenAndHandsOutTheSame) {
  const TemporaryDirectory directory;
  DumpReader reader(simple(directory.path()).write());
  const auto first = reader.rank_file(1);
  EXPECT_EQ(first.get(), reader.rank_file(1).get());
  EXPECT_EQ(first->rank(), 1);
  EXPECT_NE(first.get(), reader.rank_file(0).get());
}

}  // namespace
}  // namespace gradclip
