#include "gradclip/dump/json_document.hpp"

#include <gtest/gtest.h>

#include "expect_error.hpp"
#include "gradclip/dump/checksum.hpp"

namespace gradclip {
namespace {

using test::expect_error;

std::uint64_t hash(const std::string& text) {
  return xxh3_64(text.data(), text.size());
}
JsonDocument parse(const std::string& text) {
  return parse_json(text, "FILE");
}

TEST(JsonDocument, ChecksumIsThatOfCompactSortedTextWithoutTheChecksum) {
  EXPECT_EQ(parse("{}").checksum, hash("{}"));
  EXPECT_EQ(parse(R"({"checksum": "12"})").checksum, hash("{}"));
  EXPECT_EQ(parse(R"( { "b" : [ 1 , { "z":0, "y" : null } ] ,"checksum":[1], "a":true } )").checksum,
            hash(R"({"a":true,"b":[1,{"y":null,"z":0}]})"));
  EXPECT_EQ(parse(R"({"a":[[],{},[[1],[2]]],"B":{"d":{},"c":[{"b":1,"a":2},3]}})").checksum,
            hash(R"({"B":{"c":[{"a":2,"b":1},3],"d":{}},"a":[[],{},[[1],[2]]]})"));
}

TEST(JsonDocument, ChecksumKeepsTheSpellingOfNumbersAndPythonsOfStrings) {
  EXPECT_EQ(parse(R"({"a":[1.0,1e-06,1e+16,1E5,-0.0,3.2187,123456789012345678901234567890]})").checksum,
            hash(R"({"a":[1.0,1e-06,1e+16,1E5,-0.0,3.2187,123456789012345678901234567890]})"));
  EXPECT_EQ(parse(R"({"k":"\u00e9\u2028\/\u0001\"\\\b\f\n\r\t\ud83d\ude00\u007f"})").checksum,
            hash("{\"k\":\"\u00e9\u2028/\\u0001\\\"\\\\\\b\\f\\n\\r\\t\U0001F600\x7f\"}"));
}

TEST(JsonDocument, ChecksumDoesNotDependOnStreaming) {
  const std::string text = R"({"z":1,"list":[{"b":1,"a":[2]},[3,{}],4],"other":[5]})";
  std::vector<std::string> taken;
  const JsonStream stream{"list", [&](const std::string&, std::size_t index, nlohmann::json&& value) {
                            EXPECT_EQ(index, taken.size());
                            taken.push_back(value.dump());
                          }};
  const JsonDocument streamed = parse_json(text, "FILE", &stream);
  EXPECT_EQ(streamed.checksum, parse(text).checksum);
  EXPECT_EQ(taken, (std::vector<std::string>{R"({"a":[2],"b":1})", "[3,{}]", "4"}));
  EXPECT_EQ(streamed.root.dump(), R"({"list":[],"other":[5],"z":1})");
}

TEST(JsonDocument, RootMembersAreHandedOver) {
  std::vector<std::string> taken;
  const JsonStream stream{
      "", [&](const std::string& key, std::size_t, nlohmann::json&& value) { taken.push_back(key + value.dump()); }};
  static_cast<void>(parse_json(R"({"b":{"c":[1]},"a":2})", "FILE", &stream));
  EXPECT_EQ(taken, (std::vector<std::string>{R"(b{"c":[1]})", "a2"}));
}

TEST(JsonDocument, RefusesWhatIsNotJsonOfTheFormat) {
  const auto refused = [](const std::string& text, const std::vector<std::string>& parts) {
    SCOPED_TRACE(text.substr(0, 80));
    expect_error(ExitCode::bad_input, parts, [&] { static_cast<void>(parse(text)); });
  };
  refused("", {"FILE", "not well-formed"});
  refused("[]", {"not a JSON object"});
  refused("1", {"not a JSON object"});
  refused(R"({"a":1} x)", {"not well-formed"});
  refused(R"({"a":1)", {"not well-formed"});
  refused(R"({"a":1,})", {"not well-formed"});
  refused("{\"a\":\"\xff\"}", {"not well-formed"});
  refused(R"({"a":"\ud800"})", {"not well-formed"});
  refused(R"({"a":1e400})", {"does not fit a float64"});
  refused(R"({"training":{"grad_norm":NaN}})", {"training.grad_norm", "bare NaN", "\"nan\""});
  refused(R"({"a":[0,Infinity]})", {"a[1]", "bare Infinity", "\"inf\""});
  refused(R"({"a":-Infinity})", {"bare Infinity"});
  refused(R"({"a":1,"a":2})", {"'a' stands twice"});
  refused(R"({"p":[{"x":{"k":1,"j":0,"k":[]}}]})", {"p[0].x", "'k' stands twice"});
  const std::string deep = std::string("{\"a\":") + std::string(64, '[') + std::string(64, ']') + "}";
  refused(deep, {"deeper than 64"});
  refused("{\"a\":" + std::string(100'000, '['), {"deeper than 64"});
  EXPECT_NO_THROW(parse(std::string("{\"a\":") + std::string(63, '[') + std::string(63, ']') + "}"));
}

TEST(JsonDocument, DuplicatesAmongHandedOverMembersAreRefused) {
  const JsonStream stream{"", [](const std::string&, std::size_t, nlohmann::json&&) {}};
  expect_error(ExitCode::bad_input, {"'w' stands twice"},
               [&] { static_cast<void>(parse_json(R"({"w":1,"v":2,"w":3})", "FILE", &stream)); });
}

TEST(JsonDocument, RootMembersKeepTheirText) {
  const auto members = root_members("{ \"a\" : [1, {\"x\":\"}],\"}] ,\n\"b\":\"\\\"\",\"c\\\"\":1.0e5\n}");
  ASSERT_EQ(members.size(), 3u);
  EXPECT_EQ(members[0].key, "\"a\"");
  EXPECT_EQ(members[0].value, "[1, {\"x\":\"}],\"}]");
  EXPECT_EQ(members[1].value, "\"\\\"\"");
  EXPECT_EQ(members[2].key, "\"c\\\"\"");
  EXPECT_EQ(members[2].value, "1.0e5");
  EXPECT_TRUE(root_members("{ }").empty());
}

TEST(JsonField, NamesThePathAndTheValue) {
  const auto json = nlohmann::json::parse(R"({"a":[{"b":-1,"s":"","n":"inf","big":1e300,"i":3.0}]})");
  const std::string file = "FILE";
  const JsonField root(json, file, "");
  const JsonField list = root.at("a");
  const JsonField entry = list.element(0);
  expect_error(ExitCode::bad_input, {"FILE, a[0].b: is the number -1; expected an integer >= 0"},
               [&] { static_cast<void>(entry.at("b").integer(0, std::numeric_limits<std::int64_t>::max())); });
  expect_error(ExitCode::bad_input, {"a[0].s", "not empty"}, [&] { static_cast<void>(entry.at("s").name()); });
  expect_error(ExitCode::bad_input, {"FILE, a[0]: has no key 'zz'"}, [&] { static_cast<void>(entry.at("zz")); });
  expect_error(ExitCode::bad_input, {"a[0].big"}, [&] { static_cast<void>(entry.at("big").integer(0, 5)); });
  EXPECT_EQ(entry.at("n").number(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(entry.at("i").integer(0, 5), 3);
  EXPECT_FALSE(entry.find("zz"));
}

}  // namespace
}  // namespace gradclip
