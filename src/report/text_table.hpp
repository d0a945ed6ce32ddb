#pragma once
// Tables for people that fit their numbers and their screen. Inside this room.

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/report/text_pieces.hpp"

namespace gradclip {

/// Columns for names beside others: what the widest needs, but no more than the screen has, or kWidestName where lines
/// may be of any length, and no fewer than kNarrowestName.
inline constexpr std::size_t kWidestName = 100;
inline constexpr std::size_t kNarrowestName = 12;
[[nodiscard]] std::size_t name_columns(const TextStyle& style, std::size_t widest, std::size_t others);

/// A table whose columns are as wide as their widest cell and two spaces apart. Text stands to the left and is
/// shortened where the screen is too narrow; numbers stand to the right and are never cut.
class TextTable {
 public:
  enum class Kind : std::uint8_t { text, number };

  /// @param least     columns that it takes in any case, with the gap before it
  /// @param optional  left out, the last one first, where the screen has no room for names beside it
  void column(std::string label, Kind kind, std::size_t least = 0, bool optional = false);
  /// Printable cells, one for each column.
  void row(std::vector<std::string> cells, Ink ink = Ink::plain);
  /// The labels of columns that are left out, separated by commas.
  [[nodiscard]] std::string left_out(const TextStyle& style) const;
  void write(std::ostream& out, const TextStyle& style, std::string_view indent = {}) const;

 private:
  struct Column {
    std::string label;
    Kind kind = Kind::text;
    std::size_t least = 0;
    bool optional = false;
    std::size_t width = 0;  ///< of the widest cell
  };
  struct Row {
    std::vector<std::string> cells;
    Ink ink = Ink::plain;
  };
  [[nodiscard]] std::vector<std::size_t> shown(const TextStyle& style) const;
  [[nodiscard]] std::size_t taken(std::size_t column) const;

  std::vector<Column> columns_;
  std::vector<Row> rows_;
};

}  // namespace gradclip
