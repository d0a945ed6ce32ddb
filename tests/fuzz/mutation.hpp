#pragma once
// Small damages to text, for a build without libFuzzer: the same seed gives the same damages everywhere.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>

namespace gradclip::fuzz {

/// Words that readers of JSON and of numbers trip over.
inline constexpr std::string_view kWords[] = {
    "null",
    "-1",
    "1e999",
    "18446744073709551616",
    "NaN",
    "-Infinity",
    "\"\"",
    "[]",
    "{",
    "[[[",
    "\\ud800",
    "\xff",
    "\x1b[2J",
    "\"inf\"",
    "9e18",
    "0.5",
    "../",
    "}",
    ",\"a\":1,",
    "4611686018427387904",
    "</script><b>",
    "-0",
    "\\u0000,",
    "true",
};

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  /// One to four damages. @param other  a piece of it may be taken over
  std::string mutated(std::string text, std::string_view other) {
    for (std::uint64_t left = 1 + below(4); left != 0; --left) damage(text, other);
    return text;
  }

  /// The same number of bytes, so that what lies behind them stays where it was.
  std::string overwritten(std::string bytes) {
    if (bytes.empty()) return bytes;
    for (std::uint64_t left = 1 + below(3); left != 0; --left) {
      const std::size_t at = below(bytes.size());
      // A bit, a byte, or a small, a large or any integer of 1, 2, 4 or 8 bytes.
      if (below(3) == 0) {
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        continue;
      }
      const std::uint64_t integers[] = {below(16), ~std::uint64_t{0} - below(4), std::uint64_t{1} << below(64),
                                        random_()};
      const std::uint64_t integer = integers[below(std::size(integers))];
      const std::size_t size = std::min<std::size_t>(std::size_t{1} << below(4), bytes.size() - at);
      for (std::size_t i = 0; i < size; ++i) bytes[at + i] = static_cast<char>(integer >> (8 * i));
    }
    return bytes;
  }

 private:
  /// The same everywhere, unlike std::uniform_int_distribution.
  std::uint64_t below(std::uint64_t limit) { return limit == 0 ? 0 : random_() % limit; }

  void damage(std::string& text, std::string_view other) {
    const std::size_t at = below(text.size() + 1);
    const std::size_t length = std::min<std::size_t>(below(16), text.size() - at);
    switch (below(7)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(at, text.substr(at, length));
        break;
      case 4:
        text.replace(at, length, kWords[below(std::size(kWords))]);
        break;
      case 5: {
        const std::size_t from = below(other.size() + 1);
        text.replace(at, length, other.substr(from, below(32)));
        break;
      }
      default:
        text.resize(at);
        break;
    }
  }

  std::mt19937_64 random_;
};

}  // namespace gradclip::fuzz
