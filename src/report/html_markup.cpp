#include "gradclip/report/html_markup.hpp"

#include <fmt/format.h>

#include <ostream>

#include "gradclip/base/error.hpp"
#include "gradclip/report/escapes.hpp"
#include "gradclip/report/structured_pieces.hpp"

namespace gradclip {

std::string html_text(std::string_view untrusted) {
  std::string result;
  for (const char c : printable_lines(untrusted)) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      case '\n':
        result += "&#10;";  // which no reader of attributes takes for a space
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string script_text(std::string_view untrusted) {
  std::string result;
  for (const char c : json_text(printable(untrusted))) {
    if (c == '<' || c == '>' || c == '&') {
      result += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    } else {
      result += c;
    }
  }
  return result;
}

std::string pixels(double length) {
  std::string text = fmt::format("{:.1f}", length);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text == "-0" ? "0" : text;
}

void Markup::tag(std::string_view element, const Attributes& attributes, std::string_view end) {
  out_ << '<' << element;
  for (const Attribute& attribute : attributes) {
    out_ << ' ' << attribute.name << "=\"" << html_text(attribute.value) << '"';
  }
  out_ << end;
}

void Markup::open(std::string_view element, const Attributes& attributes) {
  tag(element, attributes, ">");
  open_.push_back(element);
}

void Markup::close() {
  out_ << "</" << open_.back() << '>';
  open_.pop_back();
}

void Markup::text(std::string_view text) {
  out_ << html_text(text);
}

void Markup::element(std::string_view element, const Attributes& attributes, std::string_view content) {
  open(element, attributes);
  text(content);
  close();
}

void Markup::empty(std::string_view element, const Attributes& attributes) {
  tag(element, attributes, "/>");
}

void Markup::verbatim(std::string_view trusted) {
  out_ << trusted;
}

}  // namespace gradclip
