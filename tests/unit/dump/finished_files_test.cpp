#include "gradclip/dump/finished_files.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "gradclip/dump/checksum.hpp"
#include "temporary_directory.hpp"

namespace gradclip {
namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(FinishedFiles, AreThoseThatTheirNotesDescribe) {
  const test::TemporaryDirectory directory;
  const fs::path partial = directory.path();
  const fs::path made = partial / "output";
  fs::create_directory(made);
  std::ofstream(made / "a.h5") << "abc";
  const FinishedFile noted{{.bytes = 3, .xxh3_64 = xxh3_64("abc", 3)}, "1 2 3"};
  EXPECT_FALSE(finished_file(partial, made, "a.h5"));
  note_finished_file(partial, "a.h5", noted);
  note_finished_file(partial, "a.h5", noted);  // made anew
  const std::optional<FinishedFile> found = finished_file(partial, made, "a.h5");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->note, "1 2 3");
  EXPECT_EQ(found->record.bytes, 3u);
  EXPECT_EQ(found->record.xxh3_64, noted.record.xxh3_64);
  EXPECT_FALSE(finished_file(partial, made, "b.h5"));

  for (const char* other : {"abd", "ab", "abcd", ""}) {
    std::ofstream(made / "a.h5") << other;
    EXPECT_FALSE(finished_file(partial, made, "a.h5")) << other;
  }
  fs::remove(made / "a.h5");
  EXPECT_FALSE(finished_file(partial, made, "a.h5"));
}

TEST(FinishedFiles, AreNotTakenFromADamagedNote) {
  const test::TemporaryDirectory directory;
  const fs::path partial = directory.path();
  const fs::path made = partial / "output";
  fs::create_directory(made);
  std::ofstream(made / "a.h5") << "abc";
  note_finished_file(partial, "a.h5", {{.bytes = 3, .xxh3_64 = xxh3_64("abc", 3)}, "9"});
  const fs::path note = finished_files_directory(partial) / "a.h5";
  const std::string whole = contents(note);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    std::ofstream(note) << damaged;
    EXPECT_FALSE(finished_file(partial, made, "a.h5")) << i;
    std::ofstream(note) << whole.substr(0, i);
    EXPECT_FALSE(finished_file(partial, made, "a.h5")) << "cut at " << i;
  }
  std::ofstream(note) << whole;
  EXPECT_TRUE(finished_file(partial, made, "a.h5"));
}

}  // namespace
}  // namespace gradclip
