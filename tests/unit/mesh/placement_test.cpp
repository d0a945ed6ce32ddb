#include "gradclip/mesh/placement.hpp"

#include <gmock/gmock.h>

#include <limits>
#include <random>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Kind = Placement::Kind;

Placement shard(std::int64_t dim) {
  return {.kind = Kind::shard, .dim = dim};
}
Placement strided(std::int64_t dim, std::int64_t split_factor) {
  return {.kind = Kind::strided_shard, .dim = dim, .split_factor = split_factor};
}
Placement partial(PartialOperation operation) {
  return {.kind = Kind::partial, .operation = operation};
}

constexpr std::size_t kDimensions = 3;

TEST(Placement, every_spelling_is_read) {
  const std::vector<std::pair<std::string, Placement>> spellings{
      {"Shard(0)", shard(0)},
      {"Shard(dim=0)", shard(0)},
      {"S(0)", shard(0)},
      {"S(2)", shard(2)},
      {"Shard(-1)", shard(2)},
      {"Shard(dim=-3)", shard(0)},
      {"Shard(00)", shard(0)},
      {"  Shard ( dim\t=\n1 ) ", shard(1)},
      {"(Shard(dim=1),)", shard(1)},
      {"[S(1)]", shard(1)},
      {"[ S(1) , ]", shard(1)},
      {"torch.distributed.tensor.placement_types.Shard(dim=1)", shard(1)},
      {"Replicate()", {.kind = Kind::replicate}},
      {"Replicate( )", {.kind = Kind::replicate}},
      {"R", {.kind = Kind::replicate}},
      {"(R)", {.kind = Kind::replicate}},
      {"(R,)", {.kind = Kind::replicate}},
      {"Partial()", partial(PartialOperation::sum)},
      {"P", partial(PartialOperation::sum)},
      {" P ", partial(PartialOperation::sum)},
      {"(P,)", partial(PartialOperation::sum)},
      {"P()", partial(PartialOperation::sum)},
      {"_Partial()", partial(PartialOperation::sum)},
      {"Partial(sum)", partial(PartialOperation::sum)},
      {"P(sum)", partial(PartialOperation::sum)},
      {"P( avg )", partial(PartialOperation::avg)},
      {"Partial(max)", partial(PartialOperation::max)},
      {"P(min)", partial(PartialOperation::min)},
      {"Partial(product)", partial(PartialOperation::product)},
      {"Partial('avg')", partial(PartialOperation::avg)},
      {"Partial(\"avg\")", partial(PartialOperation::avg)},
      {"Partial(reduce_op='avg')", partial(PartialOperation::avg)},
      {"_StridedShard(dim=0, sf=2)", strided(0, 2)},
      {"_StridedShard(0, split_factor=2)", strided(0, 2)},
      {"_StridedShard(dim=-1,split_factor=6)", strided(2, 6)},
      {"_StridedShard(split_factor=6, dim=1)", strided(1, 6)},
      {"_StridedShard(0, 2)", strided(0, 2)},
      {"_S(0, 2)", strided(0, 2)},
      {"_S(1,1)", strided(1, 1)},
      {"_S(0, 9223372036854775807)", strided(0, std::numeric_limits<std::int64_t>::max())},
      {"Flat()", {.kind = Kind::flat}},
  };
  for (const auto& [text, expected] : spellings) {
    try {
      EXPECT_EQ(parse_placement(text, kDimensions), expected) << text;
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

TEST(Placement, the_first_spelling_is_written) {
  EXPECT_EQ(to_string(shard(3)), "Shard(3)");
  EXPECT_EQ(to_string(strided(0, 2)), "_StridedShard(dim=0, sf=2)");
  EXPECT_EQ(to_string(partial(PartialOperation::sum)), "Partial(sum)");
  EXPECT_EQ(to_string(partial(PartialOperation::product)), "Partial(product)");
  EXPECT_EQ(to_string(Placement{}), "Replicate()");
  EXPECT_EQ(to_string(Placement{.kind = Kind::flat}), "Flat()");
  EXPECT_EQ(to_string(std::vector<Placement>{}), "[]");
  EXPECT_EQ(to_string(std::vector<Placement>{shard(0), Placement{}}), "[Shard(0), Replicate()]");
}

TEST(Placement, what_is_written_is_read_back) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    Placement placement{.kind = static_cast<Kind>(random() % 5)};
    const std::size_t dimensions = 1 + random() % 8;
    if (placement.kind == Kind::shard || placement.kind == Kind::strided_shard) {
      placement.dim = static_cast<std::int64_t>(random() % dimensions);
    }
    if (placement.kind == Kind::strided_shard) {
      placement.split_factor = static_cast<std::int64_t>((random() >> 1 >> random() % 63) + 1);
    }
    if (placement.kind == Kind::partial) placement.operation = static_cast<PartialOperation>(random() % 5);
    EXPECT_EQ(parse_placement(to_string(placement), dimensions), placement) << to_string(placement);
  }
}

struct Malformed {
  std::string text;
  std::string found;
  std::string expected;
};

TEST(Placement, malformed_text_says_what_was_expected_and_where) {
  const std::vector<Malformed> cases{
      {"", "ends at column 1", "the name of a placement at the start"},
      {"   ", "ends at column 4", "the name of a placement at the start"},
      {"Shard", "ends at column 6", "'(' after 'Shard'"},
      {"Shard 0", "'0' at column 7", "'(' after 'Shard'"},
      {"Shard(", "ends at column 7", "a tensor dimension after 'Shard('"},
      {"Shard()", "')' at column 7", "a tensor dimension after 'Shard('"},
      {"Shard(0", "ends at column 8", "')' after 'Shard(0'"},
      {"Shard(0]", "']' at column 8", "')' after 'Shard(0'"},
      {"Shard(0))", "')' at column 9", "nothing more after 'Shard(0)'"},
      {"Shard(0) Shard(1)", "'Shard(1)' at column 10", "nothing more after 'Shard(0)'"},
      {"Shard(0),", "',' at column 9", "nothing more after 'Shard(0)'"},
      {"Shard(0, 1)", "', 1)' at column 8", "')' after 'Shard(0'"},
      {"Shard(0.5)", "'.5)' at column 8", "')' after 'Shard(0'"},
      {"Shard(+1)", "'+1)' at column 7", "a tensor dimension"},
      {"Shard(-)", "'-)' at column 7", "a tensor dimension"},
      {"Shard(--1)", "'--1)' at column 7", "a tensor dimension"},
      {"Shard(0x1)", "'x1)' at column 8", "')' after 'Shard(0'"},
      {"Shard(dim)", "')' at column 10", "'=' after 'Shard(dim'"},
      {"Shard(dim=)", "')' at column 11", "a tensor dimension after 'Shard(dim='"},
      {"Shard(axis=0)", "'axis=0)' at column 7", "'dim' after 'Shard('"},
      {"Shard(sf=2)", "'sf=2)' at column 7", "'dim' after 'Shard('"},
      {"Shard(3)", "'3)' at column 7", "a dimension from -3 to 2 of a 3-dimensional tensor"},
      {"Shard(-4)", "'-4)' at column 7", "a dimension from -3 to 2"},
      {"Shard(9223372036854775808)", "'9223372036854775808)' at column 7", "a tensor dimension"},
      {"Shard(-9223372036854775808)", "column 7", "a dimension from -3 to 2"},
      {"shard(0)", "no placement named 'shard' is known", "Shard, Replicate, Partial, _StridedShard or Flat"},
      {"Replicate", "ends at column 10", "'(' after 'Replicate'"},
      {"Replicate(0)", "'0)' at column 11", "')' after 'Replicate('"},
      {"R()", "'()' at column 2", "nothing more after 'R'"},
      {"RR", "no placement named 'RR'", "Shard, Replicate"},
      {"Partial", "ends at column 8", "'(' after 'Partial'"},
      {"Partial(mean)", "'mean)' at column 9", "sum, avg, max, min or product after 'Partial('"},
      {"Partial(bor)", "'bor)' at column 9", "sum, avg, max, min or product"},
      {"Partial(Sum)", "'Sum)' at column 9", "sum, avg, max, min or product"},
      {"Partial('sum)", "')' at column 13", "''' after"},
      {"Partial(sum", "ends at column 12", "')' after 'Partial(sum'"},
      {"Partial(op=sum)", "'op=sum)' at column 9", "sum, avg, max, min or product"},
      {"P(", "ends at column 3", "sum, avg, max, min or product"},
      {"_StridedShard(0)", "')' at column 16", "',' and the split factor after '_StridedShard(0'"},
      {"_StridedShard(sf=2)", "')' at column 19", "',' and the dimension"},
      {"_StridedShard(dim=0, sf=0)", "'0)' at column 25", "a split factor of at least 1"},
      {"_StridedShard(dim=0, sf=-2)", "'-2)' at column 25", "a split factor of at least 1"},
      {"_StridedShard(dim=0, dim=0)", "'dim=0)' at column 22", "'dim' and 'sf', once each"},
      {"_StridedShard(0, dim=0)", "'dim=0)' at column 18", "'dim' and 'sf', once each"},
      {"_StridedShard(dim=0, 2)", "'2)' at column 22", "a keyword after"},
      {"_StridedShard(dim=0 sf=2)", "'sf=2)' at column 21", "',' and the split factor"},
      {"_S(0, 2, 1)", "', 1)' at column 8", "')' after '_S(0, 2'"},
      {"_S(0,)", "')' at column 6", "a split factor after '_S(0,'"},
      {"Flat", "ends at column 5", "'(' after 'Flat'"},
      {"Flat(0)", "'0)' at column 6", "')' after 'Flat('"},
      {"(Shard(0)", "ends at column 10", "')' after '(Shard(0)'"},
      {"(Shard(0)]", "']' at column 10", "')' after '(Shard(0)'"},
      {"[Shard(0), Shard(1)]", "'Shard(1)]' at column 12", "']' after '[Shard(0),'"},
      {"((R))", "'(R))' at column 2", "the name of a placement"},
      {"_MaskPartial(reduce_op=sum, offset_shape=None, offset_dim=0)", "_MaskPartial stands on outputs", "Shard,"},
      {"MaskP(sum, None, 0)", "MaskP stands on outputs", "Shard,"},
      {"_NormPartial(2.0)", "_NormPartial stands on norms", "Shard,"},
      {"RaggedShard(dims=(0,), local_units=(1,))", "no placement named 'RaggedShard' is known", "Shard,"},
      {"R\x1b[31m", "'\\x1b[31m' at column 2", "nothing more after 'R'"},
      {std::string("R\0", 2), "'\\x00' at column 2", "nothing more after 'R'"},
      {"\xff", "'\\xff' at column 1", "the name of a placement"},
  };
  for (const auto& [text, found, expected] : cases) {
    try {
      ADD_FAILURE() << text << " was read as " << to_string(parse_placement(text, kDimensions));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::bad_input);
      EXPECT_THAT(error.text().found, HasSubstr(found)) << error.what();
      EXPECT_THAT(error.text().expected, HasSubstr(expected)) << error.what();
      EXPECT_THAT(error.what(), AllOf(HasSubstr("placement '"), HasSubstr("known spellings are Shard(0)")));
      EXPECT_THAT(error.what(), Not(HasSubstr("\x1b")));
    }
  }
}

TEST(Placement, a_scalar_has_no_shards) {
  EXPECT_EQ(parse_placement("Replicate()", 0).kind, Kind::replicate);
  try {
    (void)parse_placement("Shard(0)", 0);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("no shard of a tensor without dimensions"));
  }
}

TEST(Placement, a_long_text_makes_a_short_message) {
  try {
    (void)parse_placement("Shard(0)" + std::string(1 << 20, 'x'), 1);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_LT(std::string(error.what()).size(), 1000u);
  }
}

TEST(Placement, random_damage_never_does_more_than_refuse) {
  std::mt19937_64 random(3);
  const std::vector<std::string> seeds{"_StridedShard(dim=0, sf=2)", "Partial(sum)", "(Shard(dim=0),)", "P", "Flat()"};
  constexpr std::string_view kBytes = "()[],='\"-0129_SRPdimsf \0\x80\xff.";
  for (int round = 0; round < 20000; ++round) {
    std::string text = seeds[random() % seeds.size()];
    for (std::size_t edits = 1 + random() % 3; edits > 0; --edits) {
      const std::size_t at = random() % (text.size() + 1);
      if (random() % 2 == 0) {
        text.insert(at, 1, kBytes[random() % kBytes.size()]);
      } else if (at < text.size()) {
        text.erase(at, 1);
      }
    }
    try {
      const Placement placement = parse_placement(text, 2);
      EXPECT_EQ(parse_placement(to_string(placement), 2), placement) << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::bad_input) << text;
    }
  }
}

}  // namespace
}  // namespace gradclip
