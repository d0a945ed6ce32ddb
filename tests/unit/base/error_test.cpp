#include "gradclip/base/error.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>

namespace gradclip {
namespace {

using namespace std::string_view_literals;
using ::testing::HasSubstr;
using ::testing::Not;

std::string message(ErrorText text) {
  return Error(ExitCode::bad_input, std::move(text)).what();
}

TEST(Error, composes_its_parts) {
  EXPECT_EQ(message({.where = "file 'a'", .found = "shape [2]", .expected = "[3]", .advice = "record again"}),
            "file 'a': shape [2]; expected [3]; record again");
  EXPECT_EQ(message({.where = "file 'a'", .found = "no such file", .expected = {}, .advice = {}}),
            "file 'a': no such file");
  EXPECT_EQ(message({.where = {}, .found = "shape [2]", .expected = "[3]", .advice = {}}), "shape [2]; expected [3]");
  EXPECT_EQ(message({.where = {}, .found = "no space", .expected = {}, .advice = "free some"}), "no space; free some");
}

TEST(Error, repeats_no_more_of_the_input_than_a_person_reads) {
  std::string euros;
  while (euros.size() < 100'000) euros += "\xE2\x82\xAC";
  const std::string shown = message({.where = "file 'a'", .found = euros, .expected = euros, .advice = {}});
  EXPECT_LT(shown.size(), 33'000u);
  EXPECT_TRUE(is_valid_utf8(shown));
  EXPECT_THAT(shown, Not(HasSubstr("\\x")));
}

TEST(Error, keeps_code_text_and_location) {
  const auto line = static_cast<unsigned>(__LINE__ + 1);
  const Error error(ExitCode::resources, {.where = "w", .found = "f", .expected = "e", .advice = "a"});
  EXPECT_EQ(error.code(), ExitCode::resources);
  EXPECT_EQ(error.text().where, "w");
  EXPECT_EQ(error.text().found, "f");
  EXPECT_EQ(error.text().expected, "e");
  EXPECT_EQ(error.text().advice, "a");
  EXPECT_EQ(error.location().line(), line);
  EXPECT_THAT(error.location().file_name(), HasSubstr("error_test.cpp"));
}

TEST(Error, what_holds_no_control_characters_whatever_the_parts_hold) {
  const std::string nasty = "\x1b]0;owned\x07\r\n\t\x7f\xc2\x9b";
  const std::string text = message({.where = nasty, .found = nasty, .expected = nasty, .advice = nasty});
  EXPECT_TRUE(std::none_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7f || byte == 0x9b;
  })) << text;
}

TEST(Error, an_untrusted_name_is_escaped_once) {
  EXPECT_EQ(message({.where = "parameter " + quoted("a\n"sv), .found = "missing", .expected = {}, .advice = {}}),
            "parameter 'a\\x0a': missing");
}

TEST(Error, a_broken_promise_is_a_bug) {
  const auto checked = [](int value) { GRADCLIP_CHECK(value == 1, "value is " + std::to_string(value)); };
  EXPECT_NO_THROW(checked(1));
  try {
    checked(2);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::bug);
    EXPECT_THAT(error.what(), HasSubstr("value == 1"));
    EXPECT_THAT(error.what(), HasSubstr("value is 2"));
  }
}

TEST(Graver, order_of_codes) {
  // 70 before 5 before 3 before 4 before the rest.
  const ExitCode order[] = {ExitCode::bug,   ExitCode::resources, ExitCode::bad_input, ExitCode::nonfinite,
                            ExitCode::usage, ExitCode::findings,  ExitCode::done};
  for (std::size_t i = 0; i < std::size(order); ++i) {
    for (std::size_t j = 0; j < std::size(order); ++j) {
      EXPECT_EQ(graver(order[i], order[j]), order[std::min(i, j)]);
    }
  }
}

TEST(Quoted, plain_names_are_unchanged) {
  EXPECT_EQ(quoted("model.layers.0.weight"sv), "'model.layers.0.weight'");
  EXPECT_EQ(quoted(""sv), "''");
  EXPECT_EQ(printable("model.layers.0.weight"), "model.layers.0.weight");
  for (const std::string_view text : {"größe", "层", "γ", "😀", "é", "\u00a0", "\u2070"}) {
    EXPECT_TRUE(is_valid_utf8(text));
    EXPECT_THAT(quoted(text), Not(HasSubstr("\\x0")));
  }
  EXPECT_EQ(printable("größe 层 😀"), "größe 层 😀");
}

TEST(Quoted, a_quote_cannot_end_the_quotation) {
  EXPECT_EQ(printable("it's"), "it's");
  const std::string text = quoted("a' and 'b\\"sv);
  // Every quote between the outer ones is escaped, and an escape cannot swallow the closing one.
  const std::string inner = text.substr(1, text.size() - 2);
  for (std::size_t i = 0; i < inner.size(); ++i) {
    if (inner[i] == '\\') {
      ++i;
      ASSERT_LT(i, inner.size()) << text;
    } else {
      EXPECT_NE(inner[i], '\'') << text;
    }
  }
}

TEST(Printable, control_characters_are_escaped) {
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\x1b[31m"), "\\x1b[31m");
  EXPECT_EQ(printable("\r\n\t\x7f"), "\\x0d\\x0a\\x09\\x7f");
  for (int c = 0; c < 0x20; ++c) {
    EXPECT_EQ(printable(std::string(1, static_cast<char>(c))).size(), 4u) << c;
  }
}

TEST(Printable, c1_controls_are_escaped) {
  for (int c = 0x80; c < 0xa0; ++c) {
    const std::string text{'\xc2', static_cast<char>(c)};
    EXPECT_EQ(printable(text).size(), 8u) << c;
  }
  EXPECT_EQ(printable("\u009b"), "\\xc2\\x9b");
  EXPECT_EQ(printable("\u00a1"), "\u00a1");
}

TEST(Printable, characters_that_reorder_hide_or_break_text_are_escaped) {
  for (const std::string_view text :
       {"\u200b", "\u200d", "\u200e", "\u200f", "\u2028", "\u2029", "\u202a", "\u202b", "\u202c", "\u202d", "\u202e",
        "\u2060", "\u2066", "\u2067", "\u2068", "\u2069", "\ufeff"}) {
    EXPECT_EQ(printable(text).size(), 12u) << printable(text);
    EXPECT_THAT(printable(text), HasSubstr("\\x"));
  }
  EXPECT_EQ(printable("\u202etxt"), "\\xe2\\x80\\xaetxt");
}

TEST(Printable, invalid_utf8_is_escaped_byte_by_byte) {
  EXPECT_EQ(printable("\xff"), "\\xff");
  EXPECT_EQ(printable("a\xc3"), "a\\xc3");                           // cut off
  EXPECT_EQ(printable("\xe5\xb1"), "\\xe5\\xb1");                    // cut off
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(printable("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // above U+10FFFF
  EXPECT_EQ(printable("\x80"), "\\x80");                             // continuation alone
  EXPECT_EQ(printable("\xc3\xc3\xb6"), "\\xc3\xc3\xb6");             // the next one is whole again
}

TEST(Utf8, well_formed_sequences_only) {
  for (const std::string_view text :
       {"", "a", "\u0080", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff"}) {
    EXPECT_TRUE(is_valid_utf8(text)) << printable(text);
  }
  for (const std::string_view text :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xf8\x88\x80\x80\x80", "\xff", "a\xe5\xb1", "\xe5\x61\x82"}) {
    EXPECT_FALSE(is_valid_utf8(text)) << printable(text);
  }
}

TEST(Printable, random_bytes_always_become_printable_utf8) {
  std::mt19937_64 random(10);
  for (int round = 0; round < 20000; ++round) {
    std::string text(random() % 12, '\0');
    for (char& c : text) c = static_cast<char>(random() % 3 == 0 ? random() % 256 : 0x80 + random() % 0x70);
    const std::string result = printable(text);
    ASSERT_TRUE(is_valid_utf8(result));
    ASSERT_EQ(printable(result), result) << "not a fixed point";
    for (const char c : result) ASSERT_TRUE(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
    if (is_valid_utf8(text) && result.find("\\x") == std::string::npos) {
      ASSERT_EQ(result, text);
    }
  }
}

}  // namespace
}  // namespace gradclip
