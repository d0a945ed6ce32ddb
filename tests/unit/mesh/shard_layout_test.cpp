#include "gradclip/mesh/shard_layout.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Kind = Placement::Kind;
using Numbers = std::vector<std::int64_t>;
using Random = std::mt19937_64;

constexpr Placement kReplicate{.kind = Kind::replicate};
constexpr Placement kPartial{.kind = Kind::partial};
constexpr Placement kFlat{.kind = Kind::flat};
Placement shard(std::int64_t dim) {
  return {.kind = Kind::shard, .dim = dim};
}
Placement strided(std::int64_t dim, std::int64_t split_factor) {
  return {.kind = Kind::strided_shard, .dim = dim, .split_factor = split_factor};
}

std::int64_t product(const Numbers& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{1}, std::multiplies<>());
}

DeviceMesh mesh_of(const Numbers& shape) {
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(product(shape)));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<std::string> names;
  for (std::size_t d = 0; d < shape.size(); ++d) names.emplace_back(1, static_cast<char>('a' + d));
  return {"m", names, shape, ranks};
}

ShardLayout layout_of(const Numbers& global_shape, const Numbers& mesh_shape, const std::vector<Placement>& placements,
                      const Numbers& coordinate, std::optional<IndexRange> flat = std::nullopt) {
  return shard_layout(global_shape, mesh_of(mesh_shape), placements, coordinate, flat, "parameter 'w'");
}

/// The indices of a range list, one by one.
Numbers indices(const RangeList& ranges) {
  Numbers result;
  for (const IndexRange& range : ranges) {
    for (std::int64_t i = range.begin; i < range.end; ++i) result.push_back(i);
  }
  return result;
}

void expect_refused(const std::function<void()>& ask, const std::string& part) {
  try {
    ask();
    ADD_FAILURE() << "accepted, but expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::bad_input) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// torch.chunk
// ---------------------------------------------------------------------------------------------------------------------

TEST(ChunkRange, sizes_are_those_of_torch_chunk) {
  const std::map<std::pair<std::int64_t, std::int64_t>, Numbers> measured{
      {{5, 4}, {2, 2, 1, 0}},        {{9, 4}, {3, 3, 3, 0}}, {{6, 4}, {2, 2, 2, 0}},
      {{10, 6}, {2, 2, 2, 2, 2, 0}}, {{4, 3}, {2, 2, 0}},    {{3, 8}, {1, 1, 1, 0, 0, 0, 0, 0}},
      {{0, 3}, {0, 0, 0}},           {{7, 1}, {7}},          {{8, 4}, {2, 2, 2, 2}},
  };
  for (const auto& [question, sizes] : measured) {
    std::int64_t next = 0;
    for (std::int64_t i = 0; i < question.second; ++i) {
      const IndexRange range = chunk_range(question.first, question.second, i);
      EXPECT_EQ(range.begin, next);
      EXPECT_EQ(range.size(), sizes[static_cast<std::size_t>(i)]) << question.first << "/" << question.second;
      next = range.end;
    }
    EXPECT_EQ(next, question.first);
  }
}

TEST(ChunkRange, does_not_overflow) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(chunk_range(kMost, 2, 1), (IndexRange{kMost / 2 + 1, kMost}));
  EXPECT_EQ(chunk_range(kMost, kMost, kMost - 1), (IndexRange{kMost - 1, kMost}));
  EXPECT_EQ(chunk_range(kMost - 1, kMost / 2, kMost / 2 - 1), (IndexRange{kMost - 3, kMost - 1}));
  EXPECT_EQ(chunk_range(kMost, kMost / 2, kMost / 2 - 1), (IndexRange{kMost, kMost}));
}

// ---------------------------------------------------------------------------------------------------------------------
// Examples that were measured elsewhere
// ---------------------------------------------------------------------------------------------------------------------

TEST(ShardLayout, fsdp_over_tp_is_one_block_by_the_closed_form) {
  for (std::int64_t dp = 1; dp <= 5; ++dp) {
    for (std::int64_t tp = 1; tp <= 5; ++tp) {
      const std::int64_t length = 3 * dp * tp;
      for (std::int64_t i = 0; i < dp; ++i) {
        for (std::int64_t j = 0; j < tp; ++j) {
          const ShardLayout layout = layout_of({length, 7}, {dp, tp}, {strided(0, tp), shard(0)}, {i, j});
          ASSERT_TRUE(layout.is_block());
          EXPECT_THAT(layout.offset(), ElementsAre(j * length / tp + i * 3, 0));
          EXPECT_THAT(layout.local_shape(), ElementsAre(3, 7));
        }
      }
    }
  }
}

TEST(ShardLayout, uneven_fsdp_over_tp_is_the_physical_layout) {
  const std::map<Numbers, IndexRange> expected{{{0, 0}, {0, 2}}, {{1, 0}, {2, 4}}, {{2, 0}, {4, 5}}, {{3, 0}, {5, 5}},
                                               {{0, 1}, {5, 6}}, {{1, 1}, {6, 7}}, {{2, 1}, {7, 8}}, {{3, 1}, {8, 9}}};
  for (const auto& [coordinate, range] : expected) {
    EXPECT_THAT(layout_of({9}, {4, 2}, {strided(0, 2), shard(0)}, coordinate).ranges(),
                ElementsAre(ElementsAre(range)));
  }
}

TEST(ShardLayout, a_bare_strided_shard_is_a_list_of_ranges) {
  const std::vector<Numbers> expected{{0, 1, 5}, {2, 3, 6}, {4, 7}, {8}};
  for (std::int64_t i = 0; i < 4; ++i) {
    const ShardLayout layout = layout_of({9}, {4}, {strided(0, 2)}, {i});
    EXPECT_EQ(indices(layout.ranges()[0]), expected[static_cast<std::size_t>(i)]);
    EXPECT_EQ(layout.is_block(), i == 3);
  }
  EXPECT_THAT(layout_of({9}, {4}, {strided(0, 2)}, {0}).ranges(),
              ElementsAre(ElementsAre(IndexRange{0, 2}, IndexRange{5, 6})));
}

TEST(ShardLayout, ranges_that_touch_are_one_block) {
  EXPECT_TRUE(layout_of({12}, {1}, {strided(0, 4)}, {0}).is_block());  // one coordinate holds everything
  EXPECT_THAT(layout_of({12}, {1}, {strided(0, 4)}, {0}).local_shape(), ElementsAre(12));
  EXPECT_TRUE(layout_of({12}, {3}, {strided(0, 1)}, {1}).is_block());  // a plain shard
  EXPECT_TRUE(layout_of({3}, {2}, {strided(0, 8)}, {0}).is_block());   // chunks of one element
  EXPECT_TRUE(layout_of({12}, {2, 2}, {strided(0, 3), shard(0)}, {0, 1}).ranges()[0].size() == 2);
  EXPECT_TRUE(layout_of({12}, {2, 3}, {strided(0, 2), shard(0)}, {0, 0}).is_block());  // narrowed to one range again
}

TEST(ShardLayout, sharding_order_of_several_strided_dimensions) {
  // [Shard, _StridedShard(sf=2), Shard] on 2 x 2 x 2: mesh dimensions 0, 2, 1.
  EXPECT_THAT(layout_of({8}, {2, 2, 2}, {shard(0), strided(0, 2), shard(0)}, {1, 0, 1}).offset(), ElementsAre(6));
  // HSDP x EP x TP: mesh dimensions 2, 3, 1.
  EXPECT_THAT(layout_of({24}, {2, 2, 2, 3}, {kReplicate, strided(0, 6), shard(0), shard(0)}, {1, 1, 0, 2}).offset(),
              ElementsAre(10));
  // Two deferred dimensions, one after the other: mesh dimensions 2, 1, 0.
  EXPECT_THAT(layout_of({24}, {3, 2, 2}, {strided(0, 4), strided(0, 2), shard(0)}, {2, 1, 0}).offset(),
              ElementsAre(10));
  // The split factor counts the first following shard only: mesh dimensions 1, 0, 2.
  EXPECT_THAT(layout_of({12}, {2, 2, 3}, {strided(0, 2), shard(0), shard(0)}, {1, 0, 2}).offset(), ElementsAre(5));
  // Shards of another tensor dimension do not count.
  EXPECT_EQ(layout_of({8, 4}, {2, 2}, {strided(0, 2), shard(1)}, {0, 1}).ranges()[0].size(), 2u);
}

TEST(ShardLayout, an_empty_shard_keeps_its_other_sizes) {
  const ShardLayout layout = layout_of({4, 5}, {3}, {shard(0)}, {2});
  EXPECT_THAT(layout.local_shape(), ElementsAre(0, 5));
  EXPECT_EQ(layout.elements(), 0u);
  EXPECT_TRUE(layout.is_block());
  EXPECT_THAT(layout.offset(), ElementsAre(4, 0));
}

TEST(ShardLayout, a_scalar_has_one_element) {
  const ShardLayout layout = layout_of({}, {2}, {kReplicate}, {1});
  EXPECT_THAT(layout.local_shape(), IsEmpty());
  EXPECT_EQ(layout.elements(), 1u);
  EXPECT_TRUE(layout.is_block());
  EXPECT_THAT(layout.global_index(0), IsEmpty());
  const ShardLayout flat = layout_of({}, {2}, {kFlat}, {1}, IndexRange{0, 1});
  EXPECT_THAT(flat.local_shape(), ElementsAre(1));
  EXPECT_THAT(flat.global_index(0), IsEmpty());
}

TEST(ShardLayout, flat_is_applied_last_wherever_it_stands) {
  // Megatron: rows over tp first, then a range of the flattened 2 x 3 block.
  for (const bool first : {true, false}) {
    const ShardLayout layout = first ? layout_of({4, 3}, {2, 2}, {kFlat, shard(0)}, {0, 1}, IndexRange{1, 5})
                                     : layout_of({4, 3}, {2, 2}, {shard(0), kFlat}, {1, 0}, IndexRange{1, 5});
    EXPECT_THAT(layout.local_shape(), ElementsAre(4));
    EXPECT_FALSE(layout.is_block());
    EXPECT_THAT(layout.global_index(0), ElementsAre(2, 1));
    EXPECT_THAT(layout.global_index(3), ElementsAre(3, 1));
    EXPECT_THROW((void)layout.offset(), Error);
    EXPECT_THROW((void)layout.global_index(4), Error);
  }
}

// What torch.distributed.tensor._utils._compute_local_shape_and_global_offset of PyTorch 2.15.0 gives. It reads every
// placement from left to right, each _StridedShard by the index-list rule, and gives the global size as the offset of a
// dimension of which nothing is held.
struct TorchCase {
  Numbers global_shape;
  Numbers mesh_shape;
  std::vector<Placement> placements;
  Numbers coordinate;
  Numbers torch_shape;
  Numbers torch_offset;
  bool agrees;  // in shape and, where something is held, in offset
};

TEST(ShardLayout, agrees_with_torch_except_where_strided_shards_are_uneven) {
  const std::vector<TorchCase> cases{
      {{9}, {4}, {shard(0)}, {2}, {3}, {6}, true},
      {{9}, {4}, {shard(0)}, {3}, {0}, {9}, true},
      {{3, 4}, {8}, {shard(0)}, {7}, {0, 4}, {3, 0}, true},
      {{6}, {2, 4}, {shard(0), shard(0)}, {0, 3}, {0}, {6}, true},  // ours would start at 3
      {{10, 6}, {2, 3}, {shard(0), shard(1)}, {1, 2}, {5, 2}, {5, 4}, true},
      {{16}, {4, 2}, {strided(0, 2), shard(0)}, {1, 0}, {2}, {2}, true},
      {{16}, {4, 2}, {strided(0, 2), shard(0)}, {2, 1}, {2}, {12}, true},
      {{24, 5}, {2, 2, 2, 3}, {kReplicate, strided(0, 6), shard(0), shard(0)}, {1, 1, 0, 2}, {2, 5}, {10, 0}, true},
      {{8}, {2, 2, 2}, {shard(0), strided(0, 2), shard(0)}, {1, 0, 1}, {1}, {6}, true},
      {{9}, {4}, {strided(0, 2)}, {0}, {3}, {0}, true},
      {{9}, {4}, {strided(0, 2)}, {1}, {3}, {2}, true},
      {{9}, {4}, {strided(0, 2)}, {3}, {1}, {8}, true},
      {{1}, {4}, {strided(0, 2)}, {3}, {0}, {1}, true},
      {{9}, {4, 2}, {strided(0, 2), shard(0)}, {0, 1}, {1}, {5}, true},
      {{9}, {4, 2}, {strided(0, 2), shard(0)}, {3, 0}, {1}, {8}, false},  // nothing is there, physically
      {{9}, {4, 2}, {strided(0, 2), shard(0)}, {3, 1}, {0}, {9}, false},
      {{7}, {3, 2}, {strided(0, 2), shard(0)}, {2, 1}, {0}, {7}, false},
      {{31}, {3, 2, 3}, {strided(0, 6), shard(0), shard(0)}, {2, 1, 1}, {2}, {23}, false},
  };
  for (const TorchCase& c : cases) {
    const std::string what = to_string(c.placements) + " at " + ::testing::PrintToString(c.coordinate);
    const ShardLayout layout = layout_of(c.global_shape, c.mesh_shape, c.placements, c.coordinate);
    bool agrees = layout.local_shape() == c.torch_shape;
    for (std::size_t d = 0; agrees && d < c.torch_shape.size(); ++d) {
      agrees = c.torch_shape[d] == 0 || layout.ranges()[d][0].begin == c.torch_offset[d];
    }
    EXPECT_EQ(agrees, c.agrees) << what;
    if (!c.agrees) {
      EXPECT_TRUE(slices_are_ambiguous(c.global_shape, mesh_of(c.mesh_shape), c.placements)) << what;
    }
  }
}

TEST(Ambiguity, is_unevenness_under_a_strided_shard) {
  const auto ambiguous = [](const Numbers& shape, const Numbers& mesh, const std::vector<Placement>& placements) {
    return slices_are_ambiguous(shape, mesh_of(mesh), placements);
  };
  EXPECT_FALSE(ambiguous({16}, {4, 2}, {strided(0, 2), shard(0)}));
  EXPECT_TRUE(ambiguous({9}, {4, 2}, {strided(0, 2), shard(0)}));
  EXPECT_TRUE(ambiguous({12}, {4, 2}, {strided(0, 2), shard(0)}));
  EXPECT_FALSE(ambiguous({9}, {4, 2}, {shard(0), shard(0)}));  // plain shards mean one thing only
  EXPECT_FALSE(
      ambiguous({9, 8}, {3, 4, 2}, {shard(0), strided(1, 2), shard(1)}));  // the uneven dimension is not strided
  EXPECT_FALSE(ambiguous({9}, {1, 2}, {strided(0, 2), shard(0)}));         // one coordinate: nothing is cut
  EXPECT_FALSE(ambiguous({9}, {4}, {strided(0, 1)}));                      // one chunk: a plain shard
  EXPECT_FALSE(ambiguous({16}, {4}, {strided(0, 2)}));
  EXPECT_TRUE(ambiguous({12}, {4}, {strided(0, 2)}));
  EXPECT_FALSE(ambiguous({0}, {4, 2}, {strided(0, 2), shard(0)}));
}

// ---------------------------------------------------------------------------------------------------------------------
// Properties
// ---------------------------------------------------------------------------------------------------------------------

/// torch.chunk on an explicit list, by walking it.
Numbers chunk_of(const Numbers& list, std::int64_t parts, std::int64_t index) {
  const std::int64_t piece = (static_cast<std::int64_t>(list.size()) + parts - 1) / parts;
  Numbers result;
  std::int64_t position = 0;
  for (const std::int64_t element : list) {
    if (piece > 0 && position++ / piece == index) result.push_back(element);
  }
  return result;
}

Numbers strided_chunk_of(const Numbers& list, std::int64_t split_factor, std::int64_t parts, std::int64_t index) {
  Numbers result;
  for (std::int64_t c = 0; c < split_factor; ++c) {
    const Numbers piece = chunk_of(chunk_of(list, split_factor, c), parts, index);
    result.insert(result.end(), piece.begin(), piece.end());
  }
  return result;
}

/// The whole meaning of a layout, spelled out: an explicit index list per tensor dimension, cut by the mesh dimensions
/// in `order`, those in `bare` by the index-list rule.
std::vector<Numbers> brute_force(const Numbers& global_shape, const DeviceMesh& mesh,
                                 const std::vector<Placement>& placements, const Coordinate& coordinate,
                                 const std::vector<std::size_t>& order, const std::vector<bool>& bare) {
  std::vector<Numbers> lists;
  for (const std::int64_t extent : global_shape) {
    lists.emplace_back(static_cast<std::size_t>(extent));
    std::iota(lists.back().begin(), lists.back().end(), 0);
  }
  for (const std::size_t m : order) {
    const Placement& placement = placements[m];
    if (placement.kind != Kind::shard && placement.kind != Kind::strided_shard) continue;
    Numbers& list = lists[static_cast<std::size_t>(placement.dim)];
    list = bare[m] ? strided_chunk_of(list, placement.split_factor, mesh.shape()[m], coordinate[m])
                   : chunk_of(list, mesh.shape()[m], coordinate[m]);
  }
  return lists;
}

/// Every element of the product of the lists, in row-major order.
std::vector<Numbers> elements_of(const std::vector<Numbers>& lists) {
  std::vector<Numbers> result{{}};
  for (const Numbers& list : lists) {
    std::vector<Numbers> longer;
    for (const Numbers& prefix : result) {
      for (const std::int64_t index : list) {
        longer.push_back(prefix);
        longer.back().push_back(index);
      }
    }
    result = std::move(longer);
  }
  return result;
}

std::int64_t between(Random& random, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(random);
}

std::size_t pick(Random& random, std::size_t count) {
  return static_cast<std::size_t>(between(random, 0, static_cast<std::int64_t>(count) - 1));
}

/// One random question; `order` and `bare` are empty where the reading is left to shard_layout alone.
struct Question {
  Numbers mesh_shape;
  std::vector<Placement> placements;
  Numbers global_shape;
  std::vector<std::size_t> order;
  std::vector<bool> bare;
};

Numbers random_mesh_shape(Random& random, std::size_t dimensions) {
  Numbers shape;
  do {
    shape.assign(dimensions, 1);
    for (std::int64_t& extent : shape) extent = between(random, 1, 8);
  } while (product(shape) > 256);
  return shape;
}

Numbers random_global_shape(Random& random, std::size_t dimensions) {
  constexpr std::array<std::int64_t, 12> kPrimes{2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
  Numbers shape;
  do {
    shape.assign(dimensions, 0);
    for (std::int64_t& extent : shape) {
      extent = between(random, 0, 1) == 0 ? kPrimes[pick(random, kPrimes.size())] : between(random, 0, 40);
      if (extent == 0 && between(random, 0, 3) != 0) extent = 1;
    }
  } while (product(shape) > 4000);
  return shape;
}

/// Something that is not a shard, or a plain shard of another dimension than `taken`.
Placement random_other(Random& random, std::size_t dimensions, std::int64_t taken) {
  const auto dim = static_cast<std::int64_t>(dimensions == 0 ? 0 : pick(random, dimensions));
  if (dimensions == 0 || dim == taken) return between(random, 0, 1) == 0 ? kReplicate : kPartial;
  return shard(dim);
}

Question random_question(Random& random) {
  Question question;
  const auto dimensions = pick(random, 5);
  question.global_shape = random_global_shape(random, dimensions);
  const auto family = dimensions == 0 ? 0 : between(random, 0, 5);
  const auto dim = static_cast<std::int64_t>(dimensions == 0 ? 0 : pick(random, dimensions));
  const auto plain = [&] {
    const auto kind = between(random, 0, dimensions == 0 ? 1 : 3);
    if (kind == 0) return kReplicate;
    if (kind == 1) return kPartial;
    return shard(static_cast<std::int64_t>(pick(random, dimensions)));
  };
  switch (family) {
    case 0:  // no strided shard: mesh order
      question.mesh_shape = random_mesh_shape(random, 1 + pick(random, 4));
      for (std::size_t m = 0; m < question.mesh_shape.size(); ++m) question.placements.push_back(plain());
      break;
    case 1:  // FSDP x TP
      question.mesh_shape = random_mesh_shape(random, 2);
      question.placements = {strided(dim, question.mesh_shape[1]), shard(dim)};
      question.order = {1, 0};
      break;
    case 2:  // HSDP x TP, or something else in front
      question.mesh_shape = random_mesh_shape(random, 3);
      question.placements = {random_other(random, dimensions, dim), strided(dim, question.mesh_shape[2]), shard(dim)};
      question.order = {0, 2, 1};
      break;
    case 3:  // HSDP x EP x TP
      question.mesh_shape = random_mesh_shape(random, 4);
      question.placements = {random_other(random, dimensions, dim),
                             strided(dim, question.mesh_shape[2] * question.mesh_shape[3]), shard(dim), shard(dim)};
      question.order = {0, 2, 3, 1};
      break;
    case 4:  // a bare one after anything plain
      question.mesh_shape = random_mesh_shape(random, 1 + pick(random, 3));
      for (std::size_t m = 0; m + 1 < question.mesh_shape.size(); ++m) question.placements.push_back(plain());
      question.placements.push_back(strided(dim, between(random, 1, 9)));
      break;
    default: {  // a bare one before a shard that its split factor does not name
      question.mesh_shape = random_mesh_shape(random, 2);
      std::int64_t split_factor = between(random, 2, 9);
      if (split_factor == question.mesh_shape[1]) ++split_factor;
      question.placements = {strided(dim, split_factor), shard(dim)};
      break;
    }
  }
  const std::size_t mesh_dimensions = question.mesh_shape.size();
  if (question.order.empty()) {
    question.order.resize(mesh_dimensions);
    std::iota(question.order.begin(), question.order.end(), std::size_t{0});
  }
  question.bare.assign(mesh_dimensions, false);
  if (family >= 4) {
    for (std::size_t m = 0; m < mesh_dimensions; ++m)
      question.bare[m] = question.placements[m].kind == Kind::strided_shard;
  }
  return question;
}

/// A mesh over scattered, shuffled ranks.
DeviceMesh random_mesh(Random& random, const Numbers& shape) {
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(product(shape)));
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<std::int32_t>(5 * i + pick(random, 5));
  std::shuffle(ranks.begin(), ranks.end(), random);
  std::vector<std::string> names;
  for (std::size_t d = 0; d < shape.size(); ++d) names.emplace_back(1, static_cast<char>('a' + d));
  return {"random", names, shape, ranks};
}

std::size_t row_major(const Numbers& global_shape, const Numbers& index) {
  std::int64_t position = 0;
  for (std::size_t d = 0; d < global_shape.size(); ++d) position = position * global_shape[d] + index[d];
  return static_cast<std::size_t>(position);
}

/// How often each global element is held, over the ranks that are first among their copies and addends.
class Cover {
 public:
  explicit Cover(const Numbers& global_shape)
      : global_shape_(global_shape), times_(static_cast<std::size_t>(product(global_shape))) {}

  void add(const Numbers& index) {
    for (std::size_t d = 0; d < index.size(); ++d) ASSERT_TRUE(index[d] >= 0 && index[d] < global_shape_[d]);
    ++times_[row_major(global_shape_, index)];
  }

  [[nodiscard]] bool is_exactly_once() const {
    return std::all_of(times_.begin(), times_.end(), [](int times) { return times == 1; });
  }

 private:
  Numbers global_shape_;
  std::vector<int> times_;
};

bool is_first(const std::vector<Placement>& placements, const Coordinate& coordinate) {
  for (std::size_t m = 0; m < placements.size(); ++m) {
    const bool splits = placements[m].kind != Kind::replicate && placements[m].kind != Kind::partial;
    if (!splits && coordinate[m] != 0) return false;
  }
  return true;
}

std::string describe(const Question& question) {
  return ::testing::PrintToString(question.global_shape) + " on " + ::testing::PrintToString(question.mesh_shape) +
         " as " + to_string(question.placements);
}

TEST(ShardLayoutProperty, shards_tile_the_tensor_exactly_once_as_a_brute_force_says) {
  Random random(4);
  for (int round = 0; round < 1500; ++round) {
    const Question question = random_question(random);
    const DeviceMesh mesh = random_mesh(random, question.mesh_shape);
    Cover cover(question.global_shape);
    for (const std::int32_t rank : mesh.ranks()) {
      const Coordinate at = mesh.coordinate(rank);
      const ShardLayout layout = shard_layout(question.global_shape, mesh, question.placements, at, {}, "w");
      const auto lists =
          brute_force(question.global_shape, mesh, question.placements, at, question.order, question.bare);
      Numbers sizes;
      for (const Numbers& list : lists) sizes.push_back(static_cast<std::int64_t>(list.size()));
      ASSERT_EQ(layout.local_shape(), sizes) << describe(question);
      ASSERT_EQ(static_cast<std::int64_t>(layout.elements()), product(layout.local_shape()));
      for (std::size_t d = 0; d < lists.size(); ++d) {
        const RangeList& ranges = layout.ranges()[d];
        ASSERT_EQ(indices(ranges), lists[d]) << describe(question);
        for (std::size_t r = 1; r < ranges.size(); ++r) ASSERT_LT(ranges[r - 1].end, ranges[r].begin) << "not merged";
      }
      if (!is_first(question.placements, at)) continue;
      const std::vector<Numbers> elements = elements_of(lists);
      ASSERT_EQ(elements.size(), layout.elements());
      for (std::size_t i = 0; i < elements.size(); ++i) {
        const Numbers index = layout.global_index(i);
        ASSERT_EQ(index, elements[i]) << describe(question);
        cover.add(index);
      }
    }
    ASSERT_TRUE(cover.is_exactly_once()) << describe(question);
  }
}

/// Any placements at all, however senseless: split factors that fit nothing, strided shards in a row.
Question wild_question(Random& random) {
  Question question;
  question.mesh_shape = random_mesh_shape(random, 1 + pick(random, 4));
  question.global_shape = random_global_shape(random, 1 + pick(random, 3));
  for (std::size_t m = 0; m < question.mesh_shape.size(); ++m) {
    const auto dim = static_cast<std::int64_t>(pick(random, question.global_shape.size()));
    const auto kind = between(random, 0, 9);
    question.placements.push_back(kind == 0   ? kReplicate
                                  : kind == 1 ? kPartial
                                  : kind <= 4 ? shard(dim)
                                              : strided(dim, between(random, 1, 12)));
  }
  return question;
}

TEST(ShardLayoutProperty, any_placements_tile_the_tensor_exactly_once) {
  Random random(5);
  for (int round = 0; round < 1500; ++round) {
    const Question question = wild_question(random);
    const DeviceMesh mesh = random_mesh(random, question.mesh_shape);
    Cover cover(question.global_shape);
    for (const std::int32_t rank : mesh.ranks()) {
      const Coordinate at = mesh.coordinate(rank);
      if (!is_first(question.placements, at)) continue;
      const ShardLayout layout = shard_layout(question.global_shape, mesh, question.placements, at, {}, "w");
      for (std::uint64_t i = 0; i < layout.elements(); ++i) cover.add(layout.global_index(i));
    }
    ASSERT_TRUE(cover.is_exactly_once()) << describe(question);
  }
}

TEST(ShardLayoutProperty, even_sizes_are_read_from_left_to_right_as_torch_does) {
  Random random(6);
  for (int round = 0; round < 1500; ++round) {
    Question question = wild_question(random);
    for (std::int64_t& extent : question.mesh_shape) extent = (extent + 1) / 2;  // smaller, for what follows
    question.global_shape.assign(1, 1);
    for (std::size_t m = 0; m < question.placements.size(); ++m) {
      Placement& placement = question.placements[m];
      placement.dim = 0;
      if (placement.kind == Kind::strided_shard) placement.split_factor = (placement.split_factor + 2) / 3;
      question.global_shape[0] *= question.mesh_shape[m] * placement.split_factor;
    }
    question.global_shape[0] = question.global_shape[0] > 2000 ? 0 : question.global_shape[0] * between(random, 1, 2);
    std::vector<std::size_t> order(question.mesh_shape.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const std::vector<bool> bare(order.size(), true);  // sf = 1 is a plain shard

    const DeviceMesh mesh = mesh_of(question.mesh_shape);
    EXPECT_FALSE(slices_are_ambiguous(question.global_shape, mesh, question.placements)) << describe(question);
    for (const std::int32_t rank : mesh.ranks()) {
      const Coordinate at = mesh.coordinate(rank);
      const ShardLayout layout = shard_layout(question.global_shape, mesh, question.placements, at, {}, "w");
      const auto lists = brute_force(question.global_shape, mesh, question.placements, at, order, bare);
      ASSERT_EQ(indices(layout.ranges()[0]), lists[0]) << describe(question);
    }
  }
}

TEST(ShardLayoutProperty, flat_ranges_tile_what_the_other_placements_leave) {
  Random random(7);
  for (int round = 0; round < 600; ++round) {
    Question question = random_question(random);
    const std::int64_t parts = between(random, 1, 4);
    const std::size_t at_dimension = pick(random, question.mesh_shape.size() + 1);
    const auto insert_at = static_cast<std::ptrdiff_t>(at_dimension);
    const DeviceMesh inner = mesh_of(question.mesh_shape);
    const std::vector<Placement> inner_placements = question.placements;
    question.mesh_shape.insert(question.mesh_shape.begin() + insert_at, parts);
    question.placements.insert(question.placements.begin() + insert_at, kFlat);
    const DeviceMesh mesh = random_mesh(random, question.mesh_shape);

    Cover cover(question.global_shape);
    for (const std::int32_t rank : mesh.ranks()) {
      const Coordinate at = mesh.coordinate(rank);
      if (!is_first(question.placements, at)) continue;
      Coordinate inner_at = at;
      inner_at.erase(inner_at.begin() + insert_at);
      std::vector<Numbers> elements = elements_of(
          brute_force(question.global_shape, inner, inner_placements, inner_at, question.order, question.bare));
      // Parts of uneven sizes: the first gets two thirds.
      const auto count = static_cast<std::int64_t>(elements.size());
      const std::int64_t part = at[at_dimension];
      const auto border = [&](std::int64_t p) { return p == 0 ? 0 : p == parts ? count : count - (count / 3) / p; };
      const IndexRange range{border(part), border(part + 1)};
      const ShardLayout layout = shard_layout(question.global_shape, mesh, question.placements, at, range, "w");
      ASSERT_THAT(layout.local_shape(), ElementsAre(range.size())) << describe(question);
      ASSERT_EQ(static_cast<std::int64_t>(layout.elements()), range.size());
      for (std::uint64_t i = 0; i < layout.elements(); ++i) {
        const Numbers index = layout.global_index(i);
        ASSERT_EQ(index, elements[static_cast<std::size_t>(range.begin) + i]) << describe(question);
        cover.add(index);
      }
    }
    ASSERT_TRUE(cover.is_exactly_once()) << describe(question);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Recorded slices
// ---------------------------------------------------------------------------------------------------------------------

TEST(RecordedLayout, whole) {
  const ShardLayout layout = whole_layout(Numbers{3, 4});
  EXPECT_TRUE(layout.is_block());
  EXPECT_THAT(layout.local_shape(), ElementsAre(3, 4));
  EXPECT_THAT(layout.global_index(7), ElementsAre(1, 3));
  EXPECT_EQ(whole_layout(Numbers{}).elements(), 1u);
  EXPECT_EQ(whole_layout(Numbers{5, 0}).elements(), 0u);
}

TEST(RecordedLayout, a_block_from_its_offset) {
  const ShardLayout layout = layout_from_offset(Numbers{10, 6}, Numbers{5, 4}, Numbers{5, 2}, "w");
  EXPECT_TRUE(layout.is_block());
  EXPECT_THAT(layout.offset(), ElementsAre(5, 4));
  EXPECT_THAT(layout.global_index(3), ElementsAre(6, 5));
  EXPECT_EQ(layout_from_offset(Numbers{9}, Numbers{9}, Numbers{0}, "w").elements(), 0u);
  EXPECT_THAT(layout_from_offset(Numbers{9, 2}, Numbers{-1, 0}, Numbers{0, 2}, "w").offset(), ElementsAre(9, 0));
  EXPECT_EQ(layout_from_offset(Numbers{}, Numbers{}, Numbers{}, "w").elements(), 1u);
}

TEST(RecordedLayout, a_block_that_does_not_fit_is_refused) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const auto ask = [](Numbers global, Numbers offset, Numbers local) {
    return [=] { (void)layout_from_offset(global, offset, local, "parameter 'w'"); };
  };
  expect_refused(ask({10, 6}, {5, 5}, {5, 2}),
                 "parameter 'w': offset [5, 5] with local shape [5, 2]; expected a block within global shape [10, 6]");
  expect_refused(ask({10}, {11}, {0}), "within global shape [10]");
  expect_refused(ask({10}, {-1}, {1}), "within global shape [10]");
  expect_refused(ask({10}, {-2}, {0}), "within global shape [10]");
  expect_refused(ask({10}, {0}, {-1}), "within global shape [10]");
  expect_refused(ask({10}, {kMost}, {kMost}), "within global shape [10]");
  expect_refused(ask({10}, {1}, {kMost}), "within global shape [10]");
  expect_refused(ask({10, 6}, {5}, {5, 2}), "2 numbers in each");
  expect_refused(ask({10, 6}, {5, 0}, {5}), "2 numbers in each");
  expect_refused(ask({}, {0}, {}), "0 numbers in each");
  expect_refused(ask({std::int64_t{1} << 40, std::int64_t{1} << 40}, {0, 0}, {1, 1}), "fewer than 2^63 elements");
}

TEST(RecordedLayout, ranges_one_after_another) {
  const std::vector<DimensionRange> ranges{{0, {0, 2}}, {1, {1, 3}}, {0, {5, 6}}, {0, {6, 7}}};
  const ShardLayout layout = layout_from_ranges(Numbers{9, 4}, ranges, "w");
  EXPECT_THAT(layout.local_shape(), ElementsAre(4, 2));
  EXPECT_THAT(layout.ranges()[0], ElementsAre(IndexRange{0, 2}, IndexRange{5, 7}));
  EXPECT_FALSE(layout.is_block());
  EXPECT_THAT(layout.global_index(5), ElementsAre(5, 2));
}

TEST(RecordedLayout, a_dimension_without_ranges_holds_nothing) {
  const std::vector<DimensionRange> ranges{{0, {4, 4}}, {1, {0, 4}}};
  EXPECT_THAT(layout_from_ranges(Numbers{9, 4}, ranges, "w").local_shape(), ElementsAre(0, 4));
  EXPECT_THAT(layout_from_ranges(Numbers{9, 4}, ranges, "w").offset(), ElementsAre(4, 0));
  EXPECT_THAT(layout_from_ranges(Numbers{9, 4}, {}, "w").local_shape(), ElementsAre(0, 0));
  EXPECT_EQ(layout_from_ranges(Numbers{}, {}, "w").elements(), 1u);
}

TEST(RecordedLayout, ranges_that_do_not_fit_are_refused) {
  const auto ask = [](std::vector<DimensionRange> ranges) {
    return [ranges] { (void)layout_from_ranges(Numbers{9, 4}, ranges, "parameter 'w'"); };
  };
  expect_refused(ask({{2, {0, 1}}}), "a range of dimension 2");
  expect_refused(ask({{-1, {0, 1}}}), "a range of dimension -1");
  expect_refused(ask({{0, {0, 10}}}), "parameter 'w': range [0, 10) of dimension 0; expected ascending");
  expect_refused(ask({{0, {-1, 2}}}), "range [-1, 2)");
  expect_refused(ask({{0, {3, 2}}}), "range [3, 2)");
  expect_refused(ask({{0, {0, 4}}, {0, {3, 6}}}), "range [3, 6)");
  expect_refused(ask({{0, {5, 6}}, {0, {0, 2}}}), "range [0, 2)");
}

TEST(RecordedLayout, agrees_with_the_computed_layout) {
  Random random(8);
  for (int round = 0; round < 300; ++round) {
    const Question question = random_question(random);
    const DeviceMesh mesh = mesh_of(question.mesh_shape);
    const Coordinate at = mesh.coordinate(mesh.ranks()[pick(random, mesh.ranks().size())]);
    const ShardLayout layout = shard_layout(question.global_shape, mesh, question.placements, at, {}, "w");
    std::vector<DimensionRange> written;
    for (std::size_t d = 0; d < layout.ranges().size(); ++d) {
      for (const IndexRange& range : layout.ranges()[d]) written.push_back({static_cast<std::int64_t>(d), range});
    }
    EXPECT_EQ(layout_from_ranges(question.global_shape, written, "w").ranges(), layout.ranges());
    if (!layout.is_block()) continue;
    EXPECT_EQ(layout_from_offset(question.global_shape, layout.offset(), layout.local_shape(), "w").ranges(),
              layout.ranges());
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Bad input
// ---------------------------------------------------------------------------------------------------------------------

TEST(ShardLayout, refuses_bad_input) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 40;
  const auto ask = [](Numbers shape, Numbers mesh, std::vector<Placement> placements,
                      std::optional<IndexRange> flat = std::nullopt) {
    return [=] { (void)layout_of(shape, mesh, placements, Numbers(mesh.size(), 0), flat); };
  };
  expect_refused(ask({4}, {2}, {shard(1)}),
                 "parameter 'w': Shard(1) of a tensor of shape [4]; expected a dimension from 0 to 0");
  expect_refused(ask({4}, {2}, {shard(-1)}), "Shard(-1) of a tensor of shape [4]");
  expect_refused(ask({4}, {1}, {strided(7, 2)}), "_StridedShard(dim=7, sf=2) of a tensor of shape [4]");
  expect_refused(ask({}, {2}, {shard(0)}), "no shard of a tensor without dimensions");
  expect_refused(ask({4}, {2}, {strided(0, 0)}), "a split factor of at least 1");
  expect_refused(ask({4}, {2}, {strided(0, -3)}), "a split factor of at least 1");
  expect_refused(ask({4}, {2}, {}), "0 placements on mesh 'm'; expected one for each of its 1 dimensions");
  expect_refused(ask({4}, {2}, {shard(0), kReplicate}), "2 placements on mesh 'm'");
  expect_refused(ask({-4}, {2}, {shard(0)}), "shape [-4]; expected sizes of at least 0");
  expect_refused(ask({kLarge, kLarge}, {2}, {shard(0)}), "expected fewer than 2^63 elements");
  expect_refused(ask({kLarge}, {2}, {strided(0, kLarge / 2)}), "a split factor of");
  expect_refused(ask({4}, {2}, {kFlat}), "Flat() without a flat range");
  expect_refused(ask({4}, {2}, {shard(0)}, IndexRange{0, 1}), "a flat range without Flat()");
  expect_refused(ask({4}, {2, 2}, {kFlat, kFlat}, IndexRange{0, 1}), "Flat() on 2 mesh dimensions");
  expect_refused(ask({4, 2}, {2, 2}, {shard(0), kFlat}, IndexRange{0, 5}),
                 "flat range [0, 5); expected a range within [0, 4)");
  expect_refused(ask({4}, {2}, {kFlat}, IndexRange{-1, 2}), "flat range [-1, 2)");
  expect_refused(ask({4}, {2}, {kFlat}, IndexRange{3, 2}), "flat range [3, 2)");
  expect_refused(ask({kLarge, kLarge, 0}, {2}, {kFlat}, IndexRange{0, 1}), "a range within [0, 0)");
  expect_refused([] { (void)whole_layout(Numbers{kLarge, kLarge}); }, "fewer than 2^63 elements");
  expect_refused([] { (void)slices_are_ambiguous(Numbers{4}, mesh_of({2}), std::vector{shard(1)}); }, "Shard(1)");
}

TEST(ShardLayout, large_sizes_that_fit_are_exact) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 40;
  const ShardLayout layout = layout_of({kLarge, (1 << 23) - 1}, {3}, {shard(0)}, {2});
  EXPECT_THAT(layout.offset(), ElementsAre(2 * ((kLarge + 2) / 3), 0));
  EXPECT_THAT(layout.global_index(layout.elements() - 1), ElementsAre(kLarge - 1, (1 << 23) - 2));
  EXPECT_EQ(layout_of({kLarge, kLarge, 0}, {2}, {shard(0)}, {1}).elements(), 0u);
  EXPECT_EQ(layout_of({5}, {2}, {strided(0, kLarge)}, {0}).elements(), 5u);
}

TEST(ShardLayout, many_mesh_dimensions_of_size_one_are_no_burden) {
  Numbers mesh(200, 1);
  mesh[100] = 2;
  std::vector<Placement> placements(200, strided(0, 2));
  placements[150] = shard(0);
  Numbers coordinate(200, 0);
  coordinate[100] = 1;
  EXPECT_EQ(indices(layout_of({8}, mesh, placements, coordinate).ranges()[0]), (Numbers{2, 3, 6, 7}));
}

TEST(ShardLayout, the_number_of_ranges_is_bounded) {
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  EXPECT_EQ(layout_of({4 * kMost}, {2}, {strided(0, kMost)}, {1}).ranges()[0].size(), static_cast<std::size_t>(kMost));
  expect_refused([] { (void)layout_of({4 * kMost}, {2}, {strided(0, 2 * kMost)}, {1}); },
                 "parameter 'w': a split factor of 2097152 on 4194304 indices; expected at most 1048576 chunks");
}

TEST(ShardLayout, broken_promises_are_bugs) {
  const auto code_of = [](const std::function<void()>& ask) {
    try {
      ask();
    } catch (const Error& error) {
      return error.code();
    }
    return ExitCode::done;
  };
  EXPECT_EQ(code_of([] { (void)layout_of({4}, {2}, {shard(0)}, {2}); }), ExitCode::bug);
  EXPECT_EQ(code_of([] { (void)layout_of({4}, {2}, {shard(0)}, {-1}); }), ExitCode::bug);
  EXPECT_EQ(code_of([] { (void)layout_of({4}, {2}, {shard(0)}, {0, 0}); }), ExitCode::bug);
  EXPECT_EQ(code_of([] { ShardLayout({{{2, 3}, {0, 1}}}, {}); }), ExitCode::bug);
  EXPECT_EQ(code_of([] { (void)whole_layout(Numbers{2}).global_index(2); }), ExitCode::bug);
  EXPECT_EQ(code_of([] { ShardLayout({{{0, 3}}}, IndexRange{0, 4}); }), ExitCode::bad_input);
  EXPECT_EQ(code_of([] { (void)ShardLayout({{}, {{0, 3}}}, {}).offset(); }), ExitCode::done);
}

TEST(ShardLayout, a_default_layout_is_nothing) {
  EXPECT_EQ(ShardLayout().elements(), 0u);
  EXPECT_THROW((void)ShardLayout().global_index(0), Error);
}

// ---------------------------------------------------------------------------------------------------------------------
// Copies and addends
// ---------------------------------------------------------------------------------------------------------------------

TEST(ShardRole, copies_and_addends_of_a_rank) {
  const DeviceMesh mesh("m", {"r", "s", "p"}, {2, 2, 2}, {10, 11, 12, 13, 14, 15, 16, 17});
  const std::vector<Placement> placements{kReplicate, shard(0), kPartial};
  const ShardRole role = shard_role(mesh, placements, Coordinate{1, 0, 1});
  EXPECT_FALSE(role.counted);
  EXPECT_THAT(role.copies, ElementsAre(11, 15));
  EXPECT_THAT(role.addends, ElementsAre(14, 15));
  EXPECT_TRUE(shard_role(mesh, placements, Coordinate{0, 1, 1}).counted);

  const std::vector<Placement> split{shard(0), shard(1), kFlat};
  EXPECT_TRUE(shard_role(mesh, split, Coordinate{1, 1, 1}).counted);
  EXPECT_THAT(shard_role(mesh, split, Coordinate{1, 1, 1}).copies, ElementsAre(17));
  EXPECT_THAT(shard_role(mesh, split, Coordinate{1, 1, 1}).addends, ElementsAre(17));
}

TEST(ShardRole, one_copy_of_each_slice_counts) {
  Random random(9);
  for (int round = 0; round < 300; ++round) {
    const Question question = wild_question(random);
    const DeviceMesh mesh = random_mesh(random, question.mesh_shape);
    std::map<std::int32_t, int> counted_in;
    for (const std::int32_t rank : mesh.ranks()) {
      const ShardRole role = shard_role(mesh, question.placements, mesh.coordinate(rank));
      EXPECT_EQ(role.counted, role.copies.front() == rank);
      EXPECT_EQ(std::count(role.copies.begin(), role.copies.end(), rank), 1);
      EXPECT_EQ(std::count(role.addends.begin(), role.addends.end(), rank), 1);
      ++counted_in[role.copies.front()];
      // Every copy names the same copies, every addend the same addends.
      for (const std::int32_t other : role.copies) {
        EXPECT_EQ(shard_role(mesh, question.placements, mesh.coordinate(other)).copies, role.copies);
      }
      for (const std::int32_t other : role.addends) {
        EXPECT_EQ(shard_role(mesh, question.placements, mesh.coordinate(other)).addends, role.addends);
      }
    }
    for (const auto& [rank, copies] : counted_in) {
      const ShardRole role = shard_role(mesh, question.placements, mesh.coordinate(rank));
      EXPECT_TRUE(role.counted);
      EXPECT_EQ(static_cast<std::size_t>(copies), role.copies.size());
    }
  }
}

}  // namespace
}  // namespace gradclip
