#include "gradclip/report/escapes.hpp"

#include <fmt/format.h>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

bool is_alphanumeric(char c) noexcept {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

}  // namespace

std::string printable_lines(std::string_view text) {
  std::string result;
  while (true) {
    const std::size_t end = text.find('\n');
    result += printable(text.substr(0, end));
    if (end == std::string_view::npos) return result;
    result += '\n';
    text.remove_prefix(end + 1);
  }
}

std::string xml_text(std::string_view text) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
  std::string result;
  const std::string clean = printable_lines(text);
  for (std::size_t i = 0; i < clean.size(); ++i) {
    const std::string_view rest = std::string_view(clean).substr(i);
    if (rest.starts_with("\xEF\xBF\xBE") || rest.starts_with("\xEF\xBF\xBF")) {
      result += kReplacement;
      i += 2;
      continue;
    }
    switch (clean[i]) {
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
      case '\n':
        result += "&#10;";  // an attribute would make a space of it
        break;
      default:
        result += clean[i];
    }
  }
  return result;
}

std::string annotation_text(std::string_view text) {
  std::string result;
  for (const char c : printable_lines(text)) {
    if (c == '%' || c == '\n') {
      result += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    } else {
      result += c;
    }
  }
  return result;
}

std::string annotation_property(std::string_view text) {
  std::string result;
  for (const char c : annotation_text(text)) {
    if (c == ':' || c == ',') {
      result += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    } else {
      result += c;
    }
  }
  return result;
}

std::string markdown_text(std::string_view text) {
  std::string result;
  for (const char c : printable(text)) {
    const bool beyond_ascii = (static_cast<unsigned char>(c) & 0x80u) != 0;
    const bool in_address = c == '.' && (result.ends_with('w') || result.ends_with('W'));  // "www." begins a link
    const bool harmless = c == ' ' || c == '.' || c == ';' || c == '/';
    if (beyond_ascii || is_alphanumeric(c) || (harmless && !in_address)) {
      result += c;
    } else {
      result += fmt::format("&#{};", static_cast<int>(c));
    }
  }
  return result;
}

}  // namespace gradclip
