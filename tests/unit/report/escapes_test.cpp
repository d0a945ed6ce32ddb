#include "gradclip/report/escapes.hpp"

#include <gtest/gtest.h>

namespace gradclip {
namespace {

TEST(Escapes, Xml) {
  EXPECT_EQ(xml_text("a<b>&\"c'"), "a&lt;b&gt;&amp;&quot;c'");
  EXPECT_EQ(xml_text("]]>"), "]]&gt;");
  EXPECT_EQ(xml_text("two\nlines"), "two&#10;lines");
  EXPECT_EQ(xml_text("\x01\x1b[31m\r"), "\\x01\\x1b[31m\\x0d");
  EXPECT_EQ(xml_text(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(xml_text("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(xml_text("\xEF\xBF\xBE|\xEF\xBF\xBF|\xEF\xBF\xBD"), "\xEF\xBF\xBD|\xEF\xBF\xBD|\xEF\xBF\xBD");
  EXPECT_EQ(xml_text("\u00fc\U0001F600"), "\u00fc\U0001F600");
}

TEST(Escapes, Annotations) {
  EXPECT_EQ(annotation_text("50 %\r\n::error::x, y"), "50 %25\\x0d%0A::error::x, y");
  EXPECT_EQ(annotation_text("%0A"), "%250A");
  EXPECT_EQ(annotation_property("a::b,c%\n"), "a%3A%3Ab%2Cc%25%0A");
}

TEST(Escapes, Markdown) {
  EXPECT_EQ(markdown_text("layers.0.weight 1.5"), "layers.0.weight 1.5");
  EXPECT_EQ(markdown_text("a|b"), "a&#124;b");
  EXPECT_EQ(markdown_text("<img src=x>"), "&#60;img src&#61;x&#62;");
  EXPECT_EQ(markdown_text("&lt;`@me` *b* _c_ [d](e) \\"),
            "&#38;lt;&#96;&#64;me&#96; &#42;b&#42; &#95;c&#95; &#91;d&#93;&#40;e&#41; &#92;");
  EXPECT_EQ(markdown_text("two\nlines"), "two&#92;x0alines");
  EXPECT_EQ(markdown_text("www.example.org"), "www&#46;example.org");
  EXPECT_EQ(markdown_text("\u00fc"), "\u00fc");
}

}  // namespace
}  // namespace gradclip
