#include "gradclip/dump/safetensors_file.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "expect_error.hpp"
#include "temporary_directory.hpp"

namespace gradclip {
namespace {

std::uint64_t length_of(const std::string& head) {
  std::uint64_t length = 0;
  for (int i = 8; i-- > 0;) length = length << 8U | static_cast<unsigned char>(head[static_cast<std::size_t>(i)]);
  return length;
}

TEST(SafetensorsFile, LargestElementsFirstWithoutGaps) {
  const SafetensorsLayout layout = safetensors_layout({{"a", DType::float8_e5m2, {3}},
                                                       {"b", DType::bfloat16, {2, 2}},
                                                       {"empty", DType::float32, {0, 4}},
                                                       {"c\"\n", DType::float64, {}},
                                                       {"d", DType::float16, {1}}},
                                                      {{"step", "7"}}, "dump");
  const std::uint64_t begin = layout.head.size();
  EXPECT_EQ(begin % 8, 0U);
  EXPECT_EQ(length_of(layout.head), begin - 8);
  const nlohmann::json header = nlohmann::json::parse(layout.head.substr(8));  // spaces at the end are white space
  EXPECT_EQ(header.at("__metadata__"), nlohmann::json({{"step", "7"}}));
  EXPECT_EQ(header.at("c\"\n").at("data_offsets"), nlohmann::json({0, 8}));
  EXPECT_EQ(header.at("empty").at("data_offsets"), nlohmann::json({8, 8}));
  EXPECT_EQ(header.at("b").at("data_offsets"), nlohmann::json({8, 16}));
  EXPECT_EQ(header.at("d").at("data_offsets"), nlohmann::json({16, 18}));
  EXPECT_EQ(header.at("a").at("data_offsets"), nlohmann::json({18, 21}));
  EXPECT_EQ(header.at("a").at("dtype"), "F8_E5M2");
  EXPECT_EQ(header.at("b").at("shape"), nlohmann::json({2, 2}));
  EXPECT_EQ(layout.offsets, (std::vector<std::uint64_t>{begin + 18, begin + 8, begin + 8, begin, begin + 16}));
  EXPECT_EQ(layout.bytes, begin + 21);
}

TEST(SafetensorsFile, HeadersThatNoReaderTakes) {
  test::expect_error(ExitCode::bad_input, {"dump", "__metadata__"}, [] {
    static_cast<void>(safetensors_layout({{"__metadata__", DType::float32, {1}}}, {}, "dump"));
  });
  test::expect_error(ExitCode::bad_input, {"100000000"}, [] {
    static_cast<void>(safetensors_layout({}, {{"long", std::string(100'000'000, 'x')}}, "dump"));
  });
}

TEST(SafetensorsFile, IsKnownByItsBeginning) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path path = directory / "x.safetensors";
  const auto is = [&](const std::string& content) {
    std::ofstream(path, std::ios::binary) << content;
    return is_safetensors_file(path);
  };
  EXPECT_TRUE(is(safetensors_layout({}, {}, "").head));
  EXPECT_FALSE(is(""));
  EXPECT_FALSE(is("years of work"));
  EXPECT_FALSE(is(std::string("\x7F\0\0\0\0\0\0\0{}", 10)));  // ends before its header
  std::filesystem::remove(path);
  EXPECT_FALSE(is_safetensors_file(path));
  EXPECT_FALSE(is_safetensors_file(directory.path()));
}

}  // namespace
}  // namespace gradclip
