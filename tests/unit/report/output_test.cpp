#include "output.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <ostream>
#include <sstream>
#include <system_error>

#include "gradclip/base/error.hpp"
#include "temporary_directory.hpp"

namespace gradclip {
namespace {

class WholeFile : public testing::Test {
 protected:
  static std::string content(const std::filesystem::path& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  [[nodiscard]] std::ptrdiff_t entries() const {
    return std::distance(std::filesystem::directory_iterator(directory_.path()), std::filesystem::directory_iterator());
  }

  test::TemporaryDirectory directory_;
};

TEST_F(WholeFile, ReplacesAtTheEnd) {
  const std::filesystem::path path = directory_ / "r.json";
  std::ofstream(path) << "old";
  write_whole_file(path, [&](std::ostream& out) {
    for (int i = 0; i < 100'000; ++i) out << "line " << i << '\n';
    EXPECT_EQ(content(path), "old");
  });
  EXPECT_THAT(content(path), testing::StartsWith("line 0\nline 1\n"));
  EXPECT_THAT(content(path), testing::EndsWith("line 99999\n"));
  EXPECT_EQ(entries(), 1);
}

TEST_F(WholeFile, LeavesNothingWhereItFails) {
  const std::filesystem::path path = directory_ / "r.json";
  EXPECT_THROW(write_whole_file(path,
                                [](std::ostream& out) {
                                  out << "x";
                                  throw std::runtime_error("no");
                                }),
               std::runtime_error);
  EXPECT_EQ(entries(), 0);
  EXPECT_THROW(write_whole_file(directory_ / "no/r.json", [](std::ostream&) {}), Error);
}

TEST_F(WholeFile, ASymlinkToNothingYetStaysOneToo) {
  std::filesystem::create_directory(directory_ / "kept");
  std::filesystem::create_symlink("kept/second", directory_ / "first");
  std::filesystem::create_symlink("target", directory_ / "kept/second");
  write_whole_file(directory_ / "first", [](std::ostream& out) { out << "new"; });
  EXPECT_TRUE(std::filesystem::is_symlink(directory_ / "first"));
  EXPECT_TRUE(std::filesystem::is_symlink(directory_ / "kept/second"));
  EXPECT_EQ(content(directory_ / "kept/target"), "new");
}

TEST_F(WholeFile, ASymlinkStaysOne) {
  std::ofstream(directory_ / "target") << "old";
  std::filesystem::create_symlink("target", directory_ / "link");
  write_whole_file(directory_ / "link", [](std::ostream& out) { out << "new"; });
  EXPECT_TRUE(std::filesystem::is_symlink(directory_ / "link"));
  EXPECT_EQ(content(directory_ / "target"), "new");
}

TEST_F(WholeFile, ADeviceIsWrittenStraightAndItsErrorIsSeen) {
  std::filesystem::create_symlink("/dev/full", directory_ / "full");
  try {
    write_whole_file(directory_ / "full", [](std::ostream& out) { out << "x"; });
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::resources);
    EXPECT_THAT(error.what(), testing::HasSubstr("No space left"));
  }
  EXPECT_TRUE(std::filesystem::exists("/dev/full"));
}

TEST(DescriptorBuffer, AFailedWriteThrowsWithItsReason) {
  const int descriptor = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(descriptor, 0);
  DescriptorBuffer buffer(descriptor);
  std::ostream out(&buffer);
  out.exceptions(std::ios::badbit);
  try {
    out << std::string(200'000, 'x');
    ADD_FAILURE();
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code().value(), ENOSPC);
  }
  ::close(descriptor);
}

}  // namespace
}  // namespace gradclip
