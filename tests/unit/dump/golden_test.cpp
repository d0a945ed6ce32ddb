// Dumps that the Python recorder made: every promise of theirs is kept by the reader.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "dump_builder.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/dump/dump_writer.hpp"

namespace gradclip {
namespace {

std::vector<std::filesystem::path> golden_dumps() {
  std::vector<std::filesystem::path> dumps;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(GRADCLIP_GOLDEN)) {
    if (entry.path().filename() == kManifestName) dumps.push_back(entry.path().parent_path());
  }
  std::sort(dumps.begin(), dumps.end());
  return dumps;
}

TEST(Golden, EveryShardIsFoundAndItsBytesHaveTheRecordedChecksum) {
  const auto dumps = golden_dumps();
  ASSERT_FALSE(dumps.empty());
  for (const auto& directory : dumps) {
    SCOPED_TRACE(directory.string());
    DumpReader dump(directory);
    const Manifest& manifest = dump.manifest();
    EXPECT_TRUE(manifest.has_checksum);
    std::size_t shards = 0;
    for (std::int32_t rank = 0; rank < manifest.world_size; ++rank) {
      const auto file = dump.rank_file(rank);
      const FileChecksum checksum = checksum_of_file(file->path());
      const FileRecord& record = manifest.files.at(manifest.rank_file_name(rank));
      EXPECT_EQ(checksum.bytes, record.bytes);
      EXPECT_EQ(checksum.xxh3_64, record.xxh3_64);
      for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
        if (!manifest.holds(manifest.parameters[p], rank)) continue;
        const StoredShard& shard = file->locate(p);
        ++shards;
        if (shard.none) continue;
        std::vector<std::byte> bytes(shard.elements * size_of(shard.dtype));
        file->read(shard, 0, shard.elements, bytes.data());
        EXPECT_EQ(xxh3_64(bytes.data(), bytes.size()), shard.xxh3_64) << shard.dataset;
      }
      for (std::size_t k = 0; k < file->labels().size(); ++k) {
        std::vector<std::int64_t> labels(file->labels()[k].elements());
        file->read_labels(k, 0, labels.size(), labels.data());
      }
    }
    EXPECT_GT(shards, 0u);
  }
}

TEST(Golden, ARewrittenDumpIsReadAgainAndIsTheSameTwice) {
  for (const auto& directory : golden_dumps()) {
    SCOPED_TRACE(directory.string());
    const test::TemporaryDirectory scratch;
    for (const char* output : {"a", "b"}) {
      DumpReader input(directory);
      DumpWriter writer(input, scratch / output, false);
      writer.prepare();
      ManifestChanges changes;
      changes.state = input.manifest().state;
      for (std::int32_t rank = 0; rank < input.manifest().world_size; ++rank) {
        const auto file = input.rank_file(rank);
        const auto copy = writer.begin(file);
        for (std::size_t p = 0; p < input.manifest().parameters.size(); ++p) {
          if (!input.manifest().holds(input.manifest().parameters[p], rank) || file->locate(p).none) continue;
          const StoredShard& shard = file->locate(p);
          std::vector<std::byte> bytes(shard.elements * size_of(shard.dtype));
          file->read(shard, 0, shard.elements, bytes.data());
          copy->write(p, 0, shard.elements, bytes.data());
        }
        changes.files[input.manifest().rank_file_name(rank)] = copy->finish();
      }
      writer.finish(changes);
    }
    DumpReader original(directory);
    DumpReader first(scratch / "a");
    DumpReader second(scratch / "b");
    for (std::int32_t rank = 0; rank < first.manifest().world_size; ++rank) {
      EXPECT_EQ(checksum_of_file(first.rank_file(rank)->path()).xxh3_64,
                checksum_of_file(second.rank_file(rank)->path()).xxh3_64);
      for (std::size_t p = 0; p < first.manifest().parameters.size(); ++p) {
        if (!first.manifest().holds(first.manifest().parameters[p], rank)) continue;
        EXPECT_EQ(first.rank_file(rank)->locate(p).none, original.rank_file(rank)->locate(p).none);
        EXPECT_EQ(first.rank_file(rank)->locate(p).xxh3_64, original.rank_file(rank)->locate(p).xxh3_64);
      }
    }
  }
}

}  // namespace
}  // namespace gradclip
