#include "gradclip/base/dtype.hpp"

#include <gmock/gmock.h>

#include <string>

namespace gradclip {
namespace {

TEST(DType, names_are_those_of_pytorch_and_are_read_back) {
  const std::pair<DType, std::string_view> expected[] = {{DType::float64, "float64"},
                                                         {DType::float32, "float32"},
                                                         {DType::float16, "float16"},
                                                         {DType::bfloat16, "bfloat16"},
                                                         {DType::float8_e4m3fn, "float8_e4m3fn"},
                                                         {DType::float8_e5m2, "float8_e5m2"}};
  static_assert(std::size(expected) == kDTypeCount);
  std::string all;
  for (const auto& [dtype, text] : expected) {
    EXPECT_EQ(name(dtype), text);
    EXPECT_EQ(parse_dtype(text), dtype);
    EXPECT_EQ(parse_dtype("torch." + std::string(text)), dtype);
    all += (all.empty() ? "" : ", ") + std::string(text);
  }
  EXPECT_EQ(dtype_names(), all);
}

TEST(DType, sizes) {
  EXPECT_EQ(size_of(DType::float64), 8u);
  EXPECT_EQ(size_of(DType::float32), 4u);
  EXPECT_EQ(size_of(DType::float16), 2u);
  EXPECT_EQ(size_of(DType::bfloat16), 2u);
  EXPECT_EQ(size_of(DType::float8_e4m3fn), 1u);
  EXPECT_EQ(size_of(DType::float8_e5m2), 1u);
}

TEST(DType, anything_else_is_not_a_name) {
  for (const std::string_view text : {"", "float", "Float32", "float32 ", " float32", "float8", "float8_e4m3fnuz",
                                      "int64", "torch.", "torch.torch.float32", "torch.float", "half", "bf16"}) {
    EXPECT_EQ(parse_dtype(text), std::nullopt) << text;
  }
  EXPECT_EQ(parse_dtype(std::string_view("float32\0", 8)), std::nullopt);
}

}  // namespace
}  // namespace gradclip
