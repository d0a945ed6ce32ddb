#include "gradclip/base/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace gradclip {
namespace {

int gravity(ExitCode code) noexcept {
  switch (code) {
    case ExitCode::bug:
      return 6;
    case ExitCode::resources:
      return 5;
    case ExitCode::bad_input:
      return 4;
    case ExitCode::nonfinite:
      return 3;
    case ExitCode::usage:
      return 2;
    case ExitCode::findings:
      return 1;
    case ExitCode::done:
      return 0;
  }
  return 6;
}

/// Length of the well-formed UTF-8 sequence at the front of `text`; 0 if there is none.
std::size_t utf8_length(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  std::size_t length = 0;
  std::uint32_t point = 0;
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2, point = first & 0x1Fu;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3, point = first & 0x0Fu;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4, point = first & 0x07u;
  } else {
    return 0;
  }
  if (text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0u) != 0x80u) return 0;
    point = point << 6 | (byte(i) & 0x3Fu);
  }
  constexpr std::array<std::uint32_t, 5> kSmallest{0, 0, 0x80, 0x800, 0x10000};
  if (point < kSmallest[length] || point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF)) return 0;
  return length;
}

/// C1 controls and the characters that reorder or hide text: harmless to the machine, not to the reader.
bool is_control_point(std::string_view sequence) noexcept {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(sequence[i]); };
  if (sequence.size() == 1) return at(0) < 0x20 || at(0) == 0x7F;
  if (sequence.size() == 2) return (at(0) == 0xC2 && at(1) < 0xA0) || (at(0) == 0xD8 && at(1) == 0x9C);
  if (sequence.size() == 3 && at(0) == 0xE2) {
    return (at(1) == 0x80 && at(2) >= 0x8B && at(2) <= 0x8F) || (at(1) == 0x80 && at(2) >= 0xA8 && at(2) <= 0xAE) ||
           (at(1) == 0x81 && at(2) >= 0xA0 && at(2) <= 0xAF);
  }
  return sequence.size() == 3 && at(0) == 0xEF && at(1) == 0xBB && at(2) == 0xBF;
}

bool is_plain(char c) {
  return c >= 0x20 && c < 0x7F && c != '\'' && c != '\\';
}

std::string escape(std::string_view text, bool in_quotes) {
  // Most names, and they are quoted for every shard.
  if (std::all_of(text.begin(), text.end(), is_plain)) return std::string(text);
  std::string result;
  result.reserve(text.size() + 2);
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const std::string_view sequence = text.substr(0, length == 0 ? 1 : length);
    if (length == 0 || is_control_point(sequence)) {
      for (const char c : sequence) result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else if (in_quotes && (sequence == "'" || sequence == "\\")) {
      result += '\\';
      result += sequence;
    } else {
      result += sequence;
    }
    text.remove_prefix(sequence.size());
  }
  return result;
}

/// A part that repeats the input is no longer than a person reads on; two names of 4 KiB fit.
std::string readable(std::string part) {
  constexpr std::size_t kMostBytes = std::size_t{16} << 10;
  if (part.size() <= kMostBytes) return part;
  std::size_t end = kMostBytes;
  while (end != 0 && (static_cast<unsigned char>(part[end]) & 0xC0u) == 0x80u) --end;
  return part.substr(0, end) + "...";
}

ErrorText readable(ErrorText text) {
  for (std::string* part : {&text.where, &text.found, &text.expected, &text.advice}) {
    *part = readable(std::move(*part));
  }
  return text;
}

std::string compose(const ErrorText& text) {
  std::string message = text.where;
  if (!text.found.empty()) message += (message.empty() ? "" : ": ") + text.found;
  if (!text.expected.empty()) message += "; expected " + text.expected;
  if (!text.advice.empty()) message += "; " + text.advice;
  return printable(message);
}

}  // namespace

ExitCode graver(ExitCode a, ExitCode b) noexcept {
  return gravity(a) >= gravity(b) ? a : b;
}

Error::Error(ExitCode code, ErrorText text, std::source_location location)
    : code_(code), text_(readable(std::move(text))), message_(compose(text_)), location_(location) {}

std::string quoted(std::string_view untrusted) {
  return "'" + escape(untrusted, true) + "'";
}

std::string printable(std::string_view untrusted) {
  return escape(untrusted, false);
}

bool is_valid_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace gradclip
