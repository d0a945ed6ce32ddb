#include "gradclip/dump/posix_file.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <numeric>

#include "dump_builder.hpp"
#include "expect_error.hpp"

namespace gradclip {
namespace {

using test::expect_error;

TEST(PosixFile, ReadsSpreadTargetsInOrderBeyondTheVectorLimit) {
  const test::TemporaryDirectory directory;
  std::vector<unsigned char> bytes(5000);
  std::iota(bytes.begin(), bytes.end(), 0);
  std::ofstream(directory / "f", std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), 5000);
  const PosixFile file = PosixFile::open_for_reading(directory / "f");
  std::vector<unsigned char> read(4900);
  std::vector<PosixFile::Target> targets;
  for (std::size_t i = 0; i < read.size(); i += 2) targets.push_back({read.data() + i, 2});  // 2,450 > IOV_MAX
  file.read(100, targets);
  EXPECT_TRUE(std::equal(read.begin(), read.end(), bytes.begin() + 100));
}

TEST(PosixFile, AnEarlyEndIsBadInputThatNamesTheByte) {
  const test::TemporaryDirectory directory;
  std::ofstream(directory / "f") << "0123456789";
  const PosixFile file = PosixFile::open_for_reading(directory / "f");
  char to[8];
  expect_error(ExitCode::bad_input, {"ends at byte 10", "truncated"}, [&] { file.read(5, to, 8); });
  expect_error(ExitCode::bad_input, {"ends at byte 10"}, [&] { file.read(5, {{to, 4}, {to, 4}}); });
}

TEST(PosixFile, OpensRegularFilesOnly) {
  const test::TemporaryDirectory directory;
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);
  expect_error(ExitCode::bad_input, {"special file"},
               [&] { static_cast<void>(PosixFile::open_for_reading(directory / "pipe")); });
  expect_error(ExitCode::bad_input, {"is a directory"},
               [&] { static_cast<void>(PosixFile::open_for_reading(directory.path())); });
  expect_error(ExitCode::bad_input, {"No such file"},
               [&] { static_cast<void>(PosixFile::open_for_reading(directory / "none")); });
}

TEST(PosixFile, SaysWhatToDoAboutSpace) {
  EXPECT_EQ(system_error("f", "write", ENOSPC).code(), ExitCode::resources);
  EXPECT_NE(std::string(system_error("f", "write", ENOSPC).what()).find("free some space"), std::string::npos);
  EXPECT_EQ(system_error("f", "open", EACCES).code(), ExitCode::resources);
}

TEST(PosixFile, CreatesOnlyWhatIsNotThere) {
  const test::TemporaryDirectory directory;
  const PosixFile file = PosixFile::open_for_writing(directory / "f", true);
  file.allocate(0, 100);
  file.write(90, "0123456789", 10);
  EXPECT_EQ(file.size(), 100u);
  EXPECT_THROW(static_cast<void>(PosixFile::open_for_writing(directory / "f", true)), Error);
}

}  // namespace
}  // namespace gradclip
