#include "gradclip/dump/checksum.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "dump_builder.hpp"

namespace gradclip {
namespace {

TEST(Checksum, IsXxh3OfKnownInputs) {
  EXPECT_EQ(xxh3_64(nullptr, 0), 0x2d06800538d394c2u);
  EXPECT_EQ(xxh3_64("abc", 3), 0x78af5f94892f3950u);
}

TEST(Checksum, DoesNotDependOnThePieces) {
  const std::string text(100'000, 'x');
  Checksum pieces;
  for (std::size_t at = 0; at < text.size(); at += 777) {
    pieces.update(text.data() + at, std::min<std::size_t>(777, text.size() - at));
  }
  EXPECT_EQ(pieces.digest(), xxh3_64(text.data(), text.size()));
}

TEST(Checksum, TextIsSixteenDigits) {
  EXPECT_EQ(checksum_text(0xab), "00000000000000ab");
  EXPECT_EQ(parse_checksum("00000000000000aB"), 0xabu);
  EXPECT_FALSE(parse_checksum(""));
  EXPECT_FALSE(parse_checksum("0x12"));
  EXPECT_FALSE(parse_checksum("-1"));
  EXPECT_FALSE(parse_checksum("12345678901234567"));
}

TEST(Checksum, OfAFileIsThatOfItsBytes) {
  const test::TemporaryDirectory directory;
  const std::string text(3'000'000, 'y');
  std::ofstream(directory / "file") << text;
  const FileChecksum checksum = checksum_of_file(directory / "file");
  EXPECT_EQ(checksum.bytes, text.size());
  EXPECT_EQ(checksum.xxh3_64, xxh3_64(text.data(), text.size()));
}

}  // namespace
}  // namespace gradclip
