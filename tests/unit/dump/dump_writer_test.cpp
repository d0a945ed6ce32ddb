#include "gradclip/dump/dump_writer.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "dump_builder.hpp"
#include "expect_error.hpp"
#include "file_content.hpp"
#include "gradclip/dump/checksum.hpp"

namespace {

/// A file system as some tests want it.
struct Renaming {
  bool flags = true;       // renameat2() knows flags
  std::string never_from;  // a path that rename() cannot move
};
Renaming renaming;

}  // namespace

// In front of the C library's.
extern "C" int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) noexcept {
  if (!renaming.flags && flags != 0) {
    errno = EINVAL;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_renameat2, from_at, from, to_at, to, flags));
}

extern "C" int rename(const char* from, const char* to) noexcept {
  if (renaming.never_from == from) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

namespace gradclip {
namespace {

using test::DumpBuilder;
using test::expect_error;
using test::StorageSpec;
using test::TemporaryDirectory;

std::vector<double> counting(std::size_t count, double first = 0) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = first + static_cast<double>(i);
  return values;
}

DumpBuilder example(const std::filesystem::path& directory, const StorageSpec& storage = {}) {
  DumpBuilder dump(directory, 2);
  dump.mesh("tp", {"tp"}, {2}, {0, 1});
  dump.parameter({.name = "z.weight", .shape = {6, 50, 7}, .mesh = "tp", .placements = {"Shard(0)"}});
  dump.tensor("z.weight", counting(2100));
  dump.parameter({.name = "bf", .shape = {30}, .dtype = "bfloat16", .mesh = "tp", .placements = {"Shard(0)"}});
  dump.tensor("bf", counting(30));
  dump.parameter({.name = "a/odd", .shape = {40}, .dtype = "float64"}).tensor("a/odd", counting(40, 5));
  dump.parameter({.name = "empty", .shape = {1, 3}, .mesh = "tp", .placements = {"Shard(0)"}})
      .tensor("empty", {1, 2, 3});
  dump.parameter({.name = "scalar", .shape = {}, .dtype = "float16"}).tensor("scalar", {2});
  dump.parameter({.name = "none", .shape = {3}}).none(0, "none").local(1, "none", {1, 2, 3});
  dump.attribute(0, "", "site", "lab 7").attribute(1, "bf", "note", "kept too").unknown_objects();
  dump.labels(0, 2, 2, {1, 2, 3, -100}).member("custom", R"({"kept": [1, 2.50]})");
  return dump.storage(storage);
}

/// One piece of work: elements [first, first + count) of a parameter, doubled.
struct Work {
  std::size_t parameter;
  std::uint64_t first;
  std::uint64_t count;
};

std::vector<Work> work_of(const RankFile& file, const Manifest& manifest, std::uint64_t piece) {
  std::vector<Work> work;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    if (!manifest.holds(manifest.parameters[p], file.rank()) || file.locate(p).none) continue;
    for (std::uint64_t first = 0; first < file.locate(p).elements; first += piece) {
      work.push_back({p, first, std::min(piece, file.locate(p).elements - first)});
    }
  }
  return work;
}

std::vector<std::byte> doubled(const RankFile& file, const Work& item) {
  const StoredShard& shard = file.locate(item.parameter);
  std::vector<std::byte> bytes(item.count * size_of(shard.dtype));
  file.read(shard, item.first, item.count, bytes.data());
  auto values = test::decode(std::string(name(shard.dtype)), bytes);
  for (double& value : values) value *= 2;
  return test::encode(std::string(name(shard.dtype)), values);
}

ManifestChanges write_all(DumpReader& input, DumpWriter& writer, std::uint64_t piece, int threads, unsigned seed) {
  ManifestChanges changes;
  changes.clip_record = R"({"total":2.0})";
  for (std::int32_t rank = 0; rank < input.manifest().world_size; ++rank) {
    const auto file = input.rank_file(rank);
    const auto output = writer.begin(file);
    const auto work = work_of(*file, input.manifest(), piece);
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t) {
      pool.emplace_back([&, t] {
        std::mt19937 random(seed + static_cast<unsigned>(t));
        for (std::size_t i = next++; i < work.size(); i = next++) {
          const auto bytes = doubled(*file, work[i]);
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 50));
          output->write(work[i].parameter, work[i].first, work[i].count, bytes.data());
        }
      });
    }
    for (std::thread& thread : pool) thread.join();
    changes.files[input.manifest().rank_file_name(rank)] = output->finish();
  }
  return changes;
}

void clip(const std::filesystem::path& in, const std::filesystem::path& out, std::uint64_t piece = 64, int threads = 1,
          unsigned seed = 1, bool overwrite = false) {
  DumpReader input(in);
  DumpWriter writer(input, out, overwrite);
  writer.prepare();
  writer.finish(write_all(input, writer, piece, threads, seed));
}

const std::vector<StorageSpec>& storages() {
  static const std::vector<StorageSpec> all{
      {},
      {.chunk = {2, 7, 3}, .deflate = 4, .shuffle = true},
      {.chunk = {1, 50, 7}, .deflate = 4, .fletcher32 = true},
      {.packed = true},
      {.packed = true, .chunk = {16}, .deflate = 4},
      {.spelling = test::Spelling::custom_float, .checksums = false, .variable_strings = true},
      {.packed = true, .variable_strings = true},
  };
  return all;
}

TEST(DumpWriter, WritesADumpOfTheSameLayout) {
  for (const StorageSpec& storage : storages()) {
    const TemporaryDirectory directory;
    example(directory / "in", storage).write();
    clip(directory / "in", directory / "out");
    EXPECT_FALSE(std::filesystem::exists(directory / "out.partial"));
    EXPECT_FALSE(std::filesystem::exists(directory / "out" / ".gradclip-partial"));
    DumpReader input(directory / "in");
    DumpReader output(directory / "out");
    const Manifest& manifest = output.manifest();
    EXPECT_EQ(manifest.state, GradientState::after_clip);
    EXPECT_TRUE(manifest.has_checksum);
    const auto json = nlohmann::json::parse(test::file_content(directory / "out" / kManifestName));
    EXPECT_EQ(json["custom"].dump(), R"({"kept":[1,2.5]})");
    EXPECT_EQ(json["clip"]["total"], 2.0);
    for (std::int32_t rank = 0; rank < 2; ++rank) {
      const auto before = input.rank_file(rank);
      const auto after = output.rank_file(rank);
      EXPECT_EQ(after->packed(), storage.packed);
      const FileChecksum checksum = checksum_of_file(after->path());
      EXPECT_EQ(manifest.files.at(manifest.rank_file_name(rank)).bytes, checksum.bytes);
      EXPECT_EQ(manifest.files.at(manifest.rank_file_name(rank)).xxh3_64, checksum.xxh3_64);
      for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
        SCOPED_TRACE(manifest.parameters[p].name);
        const StoredShard& shard = after->locate(p);
        EXPECT_EQ(shard.none, before->locate(p).none);
        if (shard.none) continue;
        EXPECT_EQ(shard.file_offset.has_value(), before->locate(p).file_offset.has_value());
        const auto expected = doubled(*before, {p, 0, shard.elements});
        std::vector<std::byte> bytes(expected.size());
        after->read(shard, 0, shard.elements, bytes.data());
        EXPECT_EQ(bytes, expected);
        EXPECT_EQ(shard.xxh3_64, xxh3_64(bytes.data(), bytes.size()));
      }
    }
    std::vector<std::int64_t> labels(output.rank_file(0)->labels().at(0).elements());
    output.rank_file(0)->read_labels(0, 0, labels.size(), labels.data());
    EXPECT_EQ(labels, (std::vector<std::int64_t>{1, 2, 3, -100}));
  }
}

std::string text_attribute(hid_t object, const char* name) {
  const hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
  if (attribute < 0) return "no attribute";
  const hid_t type = H5Aget_type(attribute);
  std::string text(H5Tget_size(type), '\0');
  if (H5Tis_variable_str(type) > 0) {
    char* pointer = nullptr;
    H5Aread(attribute, type, &pointer);
    text = pointer;
    H5free_memory(pointer);
  } else {
    H5Aread(attribute, type, text.data());
  }
  H5Aclose(attribute);
  return text;
}

TEST(DumpWriter, KeepsTypesAttributesAndUnknownObjects) {
  const TemporaryDirectory directory;
  example(directory / "in", {.spelling = test::Spelling::custom_float}).write();
  clip(directory / "in", directory / "out");
  const hid_t file = H5Fopen((directory / "out" / "rank_00000.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  ASSERT_GE(file, 0);
  EXPECT_EQ(text_attribute(file, "site"), "lab 7");
  const hid_t extra = H5Gopen2(file, "extra", H5P_DEFAULT);
  EXPECT_EQ(text_attribute(extra, "why"), "kept");
  EXPECT_GT(H5Lexists(extra, "notes", H5P_DEFAULT), 0);
  H5Gclose(extra);
  const hid_t dataset = H5Dopen2(file, "gradients/bf", H5P_DEFAULT);
  const hid_t type = H5Dget_type(dataset);
  EXPECT_EQ(H5Tget_class(type), H5T_FLOAT);
  EXPECT_EQ(H5Tget_size(type), 2u);
  H5Dclose(dataset);
  H5Fclose(file);
  const hid_t second = H5Fopen((directory / "out" / "rank_00001.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t noted = H5Dopen2(second, "gradients/bf", H5P_DEFAULT);
  EXPECT_EQ(text_attribute(noted, "note"), "kept too");
  H5Dclose(noted);
  H5Fclose(second);
}

TEST(DumpWriter, WritesTheSameBytesWhateverThePiecesAndTheThreads) {
  for (const StorageSpec& storage : storages()) {
    SCOPED_TRACE(storage.packed);
    const TemporaryDirectory directory;
    example(directory / "in", storage).write();
    clip(directory / "in", directory / "a", 10'000);
    clip(directory / "in", directory / "b", 10'000);
    clip(directory / "in", directory / "c", 13, 4, 7);
    clip(directory / "in", directory / "d", 101, 3, 99);
    for (const char* file : {"rank_00000.h5", "rank_00001.h5", kManifestName}) {
      const std::string expected = test::file_content(directory / "a" / file);
      for (const char* other : {"b", "c", "d"}) {
        EXPECT_TRUE(test::file_content(directory / other / file) == expected) << other << "/" << file;
      }
    }
  }
}

TEST(DumpWriter, AClippedDumpClippedAgainIsWhole) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  clip(directory / "in", directory / "once");
  clip(directory / "once", directory / "twice");
  EXPECT_EQ(std::filesystem::file_size(directory / "once" / "rank_00000.h5"),
            std::filesystem::file_size(directory / "twice" / "rank_00000.h5"));
}

TEST(DumpWriter, H5dumpReadsTheOutput) {
  if (std::system("h5dump --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "no h5dump";
  const TemporaryDirectory directory;
  example(directory / "in", {.chunk = {2, 7, 3}, .deflate = 4}).write();
  clip(directory / "in", directory / "out");
  EXPECT_EQ(std::system(("h5dump " + (directory / "out" / "rank_00000.h5").string() + " > /dev/null").c_str()), 0);
}

TEST(DumpWriter, RefusesOutputsThatTouchTheInputOrWouldReplaceSomething) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  DumpReader input(directory / "in");
  const auto refused = [&](const std::filesystem::path& output, const std::string& part, bool overwrite = false) {
    expect_error(ExitCode::usage, {part}, [&] { DumpWriter writer(input, output, overwrite); });
  };
  refused("", "is empty");
  refused(directory / "in", "is the input", true);
  refused(directory / "in/", "is the input", true);
  refused(directory / "in/../in", "is the input", true);
  refused(directory / "in" / "sub", "lies inside the input", true);
  refused(directory.path(), "contains the input", true);
  std::filesystem::create_symlink(directory / "in", directory / "link");
  refused(directory / "link", "is the input", true);
  refused(directory / "nowhere" / "out", "a directory that does not exist");
  std::filesystem::create_directory(directory / "taken");
  refused(directory / "taken", "exists; choose another name, or give --overwrite");
  refused(directory / "taken", "is not a gradclip dump", true);
  std::ofstream(directory / "file") << "x";
  refused(directory / "file", "is not a gradclip dump", true);
  EXPECT_FALSE(std::filesystem::exists(directory / "out.partial"));
}

TEST(DumpWriter, RefusesOutputsWhoseStandInsTouchTheInput) {
  const TemporaryDirectory directory;
  const auto refused = [&](const std::filesystem::path& in, const std::string& part, bool overwrite) {
    example(in).write();
    std::ofstream(in / ".gradclip-partial") << "";  // as if an unfinished run had left it
    DumpReader input(in);
    expect_error(ExitCode::usage, {part}, [&] { DumpWriter writer(input, directory / "x", overwrite); });
    EXPECT_TRUE(std::filesystem::exists(in / kManifestName));
    std::filesystem::remove_all(in);
  };
  refused(directory / "x.partial", "is x.partial while it is written, which is the input", false);
  refused(directory / "x.replaced", "is x.replaced while it is written, which is the input", true);
  std::filesystem::create_directory(directory / "x.partial");
  refused(directory / "x.partial" / "in", "which contains the input", false);
  std::filesystem::remove(directory / "x.partial");
  std::filesystem::create_symlink(directory / "in", directory / "x.partial");
  refused(directory / "in", "which is the input", false);
  std::filesystem::remove(directory / "x.partial");
  std::filesystem::create_symlink(directory / "in" / "rank_00000.h5", directory / "x.partial");
  refused(directory / "in", "which lies inside the input", false);
}

TEST(DumpWriter, RefusesNamesThatTheFileSystemDoesNot) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  DumpReader input(directory / "in");
  const auto refused = [&](const std::filesystem::path& output, const std::string& part) {
    for (const bool overwrite : {false, true}) {
      expect_error(ExitCode::usage, {part}, [&] {
        DumpWriter writer(input, output, overwrite);
        writer.prepare();
      });
    }
  };
  std::filesystem::create_symlink("loop", directory / "loop");
  refused(directory / "loop", "symbolic links");
  refused(directory / "loop" / "out", "symbolic links");
  refused(directory / std::string(300, 'n'), "name too long");
  refused(directory / std::string(250, 'n'), "name too long");
  refused(directory / std::string(300, 'n') / "out", "name too long");
  std::ofstream(directory / "file") << "x";
  refused(directory / "file" / "out", "a directory that does not exist");
  std::filesystem::create_symlink("nowhere", directory / "out.partial");
  refused(directory / "out", "out.partial");
}

TEST(DumpReader, SaysHowManyRankFilesItKeepsOpen) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  const DumpReader input(directory / "in");
  EXPECT_GE(input.capacity(), 1u);
  EXPECT_LE(input.capacity(), 512u);
}

TEST(DumpWriter, OverwritesWithoutAnExchange) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  example(directory / "out").write();
  std::ofstream(directory / "out" / "old") << "x";
  renaming.flags = false;
  clip(directory / "in", directory / "out", 64, 1, 1, true);
  EXPECT_EQ(read_manifest(directory / "out").state, GradientState::after_clip);
  EXPECT_FALSE(std::filesystem::exists(directory / "out" / "old"));

  std::ofstream(directory / "out" / "old") << "x";
  renaming.never_from = (std::filesystem::canonical(directory.path()) / "out.partial" / "output").string();
  expect_error(ExitCode::resources, {"out.partial"},
               [&] { clip(directory / "in", directory / "out", 64, 1, 1, true); });
  renaming = {};
  EXPECT_TRUE(std::filesystem::exists(directory / "out" / "old"));
  EXPECT_EQ(read_manifest(directory / "out").state, GradientState::after_clip);
  EXPECT_FALSE(std::filesystem::exists(directory / "out.replaced"));
  EXPECT_FALSE(std::filesystem::exists(directory / "out.partial"));
}

TEST(DumpWriter, OverwriteReplacesAnOlderDump) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  example(directory / "out").write();
  std::ofstream(directory / "out" / "old") << "x";
  clip(directory / "in", directory / "out", 64, 1, 1, true);
  EXPECT_EQ(read_manifest(directory / "out").state, GradientState::after_clip);
  EXPECT_FALSE(std::filesystem::exists(directory / "out" / "old"));
  EXPECT_FALSE(std::filesystem::exists(directory / "out.partial"));
}

TEST(DumpWriter, LeavesNothingIfItDoesNotFinish) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  DumpReader input(directory / "in");
  {
    DumpWriter writer(input, directory / "out", false);
    writer.prepare();
    auto file = writer.begin(input.rank_file(0));
    EXPECT_TRUE(std::filesystem::exists(directory / "out.partial" / "output" / "rank_00000.h5"));
    file.reset();
    EXPECT_FALSE(std::filesystem::exists(directory / "out.partial" / "output" / "rank_00000.h5"));
    file = writer.begin(input.rank_file(1));
  }
  EXPECT_FALSE(std::filesystem::exists(directory / "out.partial"));
  EXPECT_FALSE(std::filesystem::exists(directory / "out"));
}

TEST(DumpWriter, OneRunAtATime) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  DumpReader input(directory / "in");
  DumpWriter first(input, directory / "out", false);
  first.prepare();
  {
    DumpWriter second(input, directory / "out", false);
    expect_error(ExitCode::resources, {"out.partial", "another run is writing it"}, [&] { second.prepare(); });
    second.discard();  // of a run that never began: not the other's files
  }
  EXPECT_TRUE(std::filesystem::exists(directory / "out.partial" / ".gradclip-partial"));
  first.discard();
  EXPECT_FALSE(std::filesystem::exists(directory / "out.partial"));
}

std::vector<std::string> entries(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(DumpWriter, WhoWritesIntoADiscardedOutputDoesNotHaveTheLastWord) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  DumpReader input(directory / "in");
  DumpWriter first(input, directory / "out", false);
  first.prepare();
  DumpWriter peer(input, directory / "out", false);
  const auto file = input.rank_file(1);
  auto output = peer.begin(file);
  const auto work = work_of(*file, input.manifest(), 10'000);
  for (const Work& item : work) {
    output->write(item.parameter, item.first, item.count, doubled(*file, item).data());
  }
  first.discard();
  EXPECT_EQ(entries(directory.path()), std::vector<std::string>{"in"});
  const auto given_up = [](const std::function<void()>& action) {
    expect_error(ExitCode::usage, {"out.partial", "another process has given up the run"}, action);
  };
  given_up([&] { static_cast<void>(output->finish()); });
  given_up([&] { static_cast<void>(peer.begin(input.rank_file(0))); });
  given_up([&] { first.finish({}); });
  output.reset();
  peer.discard();
  EXPECT_EQ(entries(directory.path()), std::vector<std::string>{"in"});
}

TEST(DumpWriter, AnErrorOfItsOwnStays) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  DumpReader input(directory / "in");
  DumpWriter writer(input, directory / "out", false);
  writer.prepare();
  const auto file = writer.begin(input.rank_file(0));
  expect_error(ExitCode::resources, {"rank_00000.h5"},
               [&] { static_cast<void>(writer.begin(input.rank_file(0))); });  // exists
}

TEST(DumpWriter, RemovesOnlyLeftoversOfItsOwn) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  DumpReader input(directory / "in");
  std::filesystem::create_directory(directory / "out.partial");
  std::ofstream(directory / "out.partial" / "thesis.tex") << "x";
  {
    DumpWriter writer(input, directory / "out", false);
    expect_error(ExitCode::usage, {"was not made by gradclip"}, [&] { writer.prepare(); });
  }
  EXPECT_TRUE(std::filesystem::exists(directory / "out.partial" / "thesis.tex"));
  std::filesystem::rename(directory / "out.partial" / "thesis.tex", directory / "out.partial" / "rank_00000.h5");
  std::ofstream(directory / "out.partial" / ".gradclip-partial") << "";
  clip(directory / "in", directory / "out");
  EXPECT_EQ(read_manifest(directory / "out").state, GradientState::after_clip);
}

TEST(RankFileWriter, AnUnwrittenElementIsABug) {
  const TemporaryDirectory directory;
  example(directory / "in").write();
  DumpReader input(directory / "in");
  DumpWriter writer(input, directory / "out", false);
  writer.prepare();
  const auto file = writer.begin(input.rank_file(0));
  expect_error(ExitCode::bug, {"not every element"}, [&] { static_cast<void>(file->finish()); });
  std::byte bytes[4096]{};
  expect_error(ExitCode::bug, {"outside of the shard"}, [&] { file->write(0, 1050, 1, bytes); });
  expect_error(ExitCode::bug, {"not in the file"}, [&] { file->write(5, 0, 1, bytes); });
}

TEST(RankFileWriter, CancelWakesWhoWaits) {
  for (const StorageSpec& storage : {StorageSpec{}, StorageSpec{.chunk = {2, 7, 3}, .deflate = 4}}) {
    const TemporaryDirectory directory;
    example(directory / "in", storage).write();
    DumpReader input(directory / "in");
    DumpWriter writer(input, directory / "out", false);
    writer.prepare();
    const auto file = writer.begin(input.rank_file(0));
    std::vector<std::byte> bytes(400);
    std::thread waiting(
        [&] { expect_error(ExitCode::nonfinite, {"a test"}, [&] { file->write(0, 100, 100, bytes.data()); }); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    file->cancel(std::make_exception_ptr(Error(ExitCode::nonfinite, {.where = "a test"})));
    file->cancel(std::make_exception_ptr(Error(ExitCode::resources, {.where = "a later one"})));
    waiting.join();
    expect_error(ExitCode::nonfinite, {"a test"}, [&] { file->write(0, 200, 100, bytes.data()); });
  }
}

TEST(RankFileWriter, UnknownObjectsThatLeadOutOfTheFileAreNotCopied) {
  const auto refused = [](const std::vector<std::string>& parts, const std::function<void(hid_t)>& change) {
    const TemporaryDirectory directory;
    example(directory / "in").write();
    const hid_t file = H5Fopen((directory / "in" / "rank_00000.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
    change(file);
    H5Fclose(file);
    DumpReader input(directory / "in");
    DumpWriter writer(input, directory / "out", false);
    writer.prepare();
    expect_error(ExitCode::bad_input, parts, [&] { static_cast<void>(writer.begin(input.rank_file(0))); });
    EXPECT_FALSE(std::filesystem::exists(directory / "out.partial" / "output" / "rank_00000.h5"));
  };
  refused({"/extra/leak", "is an external link"},
          [](hid_t file) { H5Lcreate_external("other.h5", "/x", file, "extra/leak", H5P_DEFAULT, H5P_DEFAULT); });
  refused({"/soft", "is a soft link"},
          [](hid_t file) { H5Lcreate_soft("/extra", file, "soft", H5P_DEFAULT, H5P_DEFAULT); });
  refused({"/extra/secret", "keeps its data in an external file"}, [](hid_t file) {
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_external(properties, "/etc/passwd", 0, 16);
    const hsize_t size = 16;
    const hid_t space = H5Screate_simple(1, &size, nullptr);
    H5Dclose(H5Dcreate2(file, "extra/secret", H5T_STD_U8LE, space, H5P_DEFAULT, properties, H5P_DEFAULT));
  });
}

}  // namespace
}  // namespace gradclip
