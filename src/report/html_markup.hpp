#pragma once
// HTML and SVG, inside this room: elements that are closed as they were opened and text that is escaped wherever it
// stands, so that no name in a report can become markup.

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gradclip {

/// Text for an element or a quoted attribute: control and direction characters as \xNN, & < > " ' and line feeds as
/// references.
[[nodiscard]] std::string html_text(std::string_view untrusted);

/// Text as a JSON string for a <script> of data: control and direction characters as \xNN, no < > & and nothing beyond
/// ASCII in it.
[[nodiscard]] std::string script_text(std::string_view untrusted);

/// A length in pixels: one decimal, none where it is whole. @pre finite
[[nodiscard]] std::string pixels(double length);

struct Attribute {
  std::string_view name;
  std::string value;

  Attribute(std::string_view of, std::string_view text) : name(of), value(text) {}
  Attribute(std::string_view of, const std::string& text) : name(of), value(text) {}
  Attribute(std::string_view of, const char* text) : name(of), value(text) {}
  Attribute(std::string_view of, double length) : name(of), value(pixels(length)) {}
  template <std::integral Integer>
  Attribute(std::string_view of, Integer number) : name(of), value(std::to_string(number)) {}
};
using Attributes = std::vector<Attribute>;

/// Writes elements to a stream, one that does not throw: a page in memory. Nothing gets out unescaped but verbatim().
class Markup {
 public:
  explicit Markup(std::ostream& out) : out_(out) {}

  /// @param element  lives until it is closed: a literal
  void open(std::string_view element, const Attributes& attributes = {});
  void close();
  void text(std::string_view text);
  /// open(), text(), close()
  void element(std::string_view element, const Attributes& attributes, std::string_view text);
  /// An element without content.
  void empty(std::string_view element, const Attributes& attributes);
  void line() { verbatim("\n"); }
  /// Our own style, script and data only.
  void verbatim(std::string_view trusted);

  [[nodiscard]] bool balanced() const noexcept { return open_.empty(); }

 private:
  void tag(std::string_view element, const Attributes& attributes, std::string_view end);

  std::ostream& out_;
  std::vector<std::string_view> open_;
};

/// Opens an element and closes it at the end of a scope.
class Tag {
 public:
  Tag(Markup& markup, std::string_view element, const Attributes& attributes = {}) : markup_(markup) {
    markup_.open(element, attributes);
  }
  ~Tag() { markup_.close(); }
  Tag(const Tag&) = delete;
  Tag& operator=(const Tag&) = delete;

 private:
  Markup& markup_;
};

}  // namespace gradclip
