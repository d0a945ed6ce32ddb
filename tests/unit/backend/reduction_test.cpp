#include "gradclip/backend/reduction.hpp"

#include <gtest/gtest.h>

#include <limits>

namespace gradclip {
namespace {

TEST(Reduction, ChunksCoverEveryElement) {
  EXPECT_EQ(chunk_count(0), 0u);
  EXPECT_EQ(chunk_count(1), 1u);
  EXPECT_EQ(chunk_count(65536), 1u);
  EXPECT_EQ(chunk_count(65537), 2u);
  EXPECT_EQ(chunk_count(std::numeric_limits<std::uint64_t>::max()), std::uint64_t{1} << 48);
}

}  // namespace
}  // namespace gradclip
