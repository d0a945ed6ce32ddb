#include "gradclip/mesh/device_mesh.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <set>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

DeviceMesh small_mesh() {
  return {"stage0", {"dp", "tp"}, {2, 3}, {7, 1, 4, 0, 9, 2}};
}

void expect_refused(const std::function<void()>& construct, const ::testing::Matcher<std::string>& message) {
  try {
    construct();
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::bad_input);
    EXPECT_THAT(std::string(error.what()), message);
  }
}

TEST(DeviceMesh, knows_its_ranks_by_coordinate) {
  const DeviceMesh mesh = small_mesh();
  EXPECT_EQ(mesh.name(), "stage0");
  EXPECT_EQ(mesh.dimensions(), 2u);
  EXPECT_EQ(mesh.dimension("tp"), 1u);
  EXPECT_EQ(mesh.dimension("pp"), std::nullopt);
  EXPECT_TRUE(mesh.contains(9));
  EXPECT_FALSE(mesh.contains(3));
  EXPECT_THAT(mesh.coordinate(9), ElementsAre(1, 1));
  EXPECT_EQ(mesh.rank_at(Coordinate{0, 2}), 4);
}

TEST(DeviceMesh, lists_ranks_along_dimensions_in_coordinate_order) {
  const DeviceMesh mesh = small_mesh();
  EXPECT_THAT(mesh.ranks_along({false, true}, Coordinate{1, 2}), ElementsAre(0, 9, 2));
  EXPECT_THAT(mesh.ranks_along({true, false}, Coordinate{1, 2}), ElementsAre(4, 2));
  EXPECT_THAT(mesh.ranks_along({true, true}, Coordinate{1, 2}), ElementsAre(7, 1, 4, 0, 9, 2));
  EXPECT_THAT(mesh.ranks_along({false, false}, Coordinate{1, 2}), ElementsAre(2));
}

TEST(DeviceMesh, coordinates_and_groups_of_random_meshes_are_consistent) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::int64_t> shape(1 + random() % 4);
    for (std::int64_t& extent : shape) extent = static_cast<std::int64_t>(1 + random() % 5);
    const auto count = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    std::vector<std::int32_t> ranks(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<std::int32_t>(i * 3 + random() % 3);
    std::shuffle(ranks.begin(), ranks.end(), random);
    std::vector<std::string> names;
    for (std::size_t d = 0; d < shape.size(); ++d) names.emplace_back(1, static_cast<char>('a' + d));
    const DeviceMesh mesh("m", names, shape, ranks);

    std::vector<bool> varies(shape.size());
    for (std::size_t d = 0; d < shape.size(); ++d) varies[d] = random() % 2 == 0;
    for (const std::int32_t rank : ranks) {
      const Coordinate at = mesh.coordinate(rank);
      EXPECT_EQ(mesh.rank_at(at), rank);
      std::vector<std::int32_t> expected;  // by trying every rank of the mesh
      for (const std::int32_t other : ranks) {
        const Coordinate place = mesh.coordinate(other);
        bool belongs = true;
        for (std::size_t d = 0; d < shape.size(); ++d) belongs = belongs && (varies[d] || place[d] == at[d]);
        if (belongs) expected.push_back(other);
      }
      EXPECT_EQ(mesh.ranks_along(varies, at), expected);
    }
  }
}

TEST(DeviceMesh, refuses_what_is_not_a_mesh) {
  using Names = std::vector<std::string>;
  expect_refused(
      [] {
        DeviceMesh("m", Names{"a", "b"}, {2, 2}, {0, 1, 2, 1});
      },
      HasSubstr("mesh 'm': rank 1 stands twice, at positions 1 and 3"));
  expect_refused([] { DeviceMesh("m", Names{"a"}, {2}, {0, -1}); }, HasSubstr("rank -1"));
  expect_refused(
      [] {
        DeviceMesh("m", Names{"a", "a"}, {1, 2}, {0, 1});
      },
      HasSubstr("dimensions 0 and 1 are both named 'a'"));
  expect_refused([] { DeviceMesh("m", Names{"a", ""}, {1, 2}, {0, 1}); }, HasSubstr("dimension 1 has an empty name"));
  expect_refused([] { DeviceMesh("m", Names{"a"}, {1, 2}, {0, 1}); }, HasSubstr("1 dimension names for 2 dimensions"));
  expect_refused(
      [] {
        DeviceMesh("m", Names{"a"}, {3}, {0, 1});
      },
      AllOf(HasSubstr("shape [3] with 2 ranks"), HasSubstr("expected 3 ranks")));
  expect_refused([] { DeviceMesh("m", Names{"a"}, {0}, {}); }, HasSubstr("extents of at least 1"));
  expect_refused([] { DeviceMesh("m", Names{"a", "b"}, {-1, -2}, {0, 1}); }, HasSubstr("extents of at least 1"));
  expect_refused([] { DeviceMesh("m", Names{}, {}, {0}); }, HasSubstr("without dimensions"));
  constexpr std::int64_t kLarge = std::int64_t{1} << 40;
  expect_refused([] { DeviceMesh("m", Names{"a", "b"}, {kLarge, kLarge}, {0}); }, HasSubstr("with 1 ranks"));
}

TEST(DeviceMesh, prints_untrusted_names_harmlessly) {
  expect_refused([] { DeviceMesh("\x1b[2J", {"a\n"}, {2}, {0, 0}); }, HasSubstr("mesh '\\x1b[2J'"));
  expect_refused([] { DeviceMesh("m", {"a\n", "a\n"}, {1, 1}, {0}); }, HasSubstr("both named 'a\\x0a'"));
}

TEST(DeviceMesh, broken_promises_are_bugs) {
  const DeviceMesh mesh = small_mesh();
  EXPECT_THROW((void)mesh.coordinate(3), Error);
  EXPECT_THROW((void)mesh.rank_at(Coordinate{0, 3}), Error);
  EXPECT_THROW((void)mesh.rank_at(Coordinate{0}), Error);
  EXPECT_THROW((void)mesh.ranks_along({true}, Coordinate{0, 0}), Error);
}

}  // namespace
}  // namespace gradclip
