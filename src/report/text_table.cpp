#include "gradclip/report/text_table.hpp"

#include <algorithm>
#include <numeric>
#include <ostream>
#include <utility>

#include "gradclip/report/names.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kGap = 2;

}  // namespace

std::size_t name_columns(const TextStyle& style, std::size_t widest, std::size_t others) {
  const std::size_t room = style.width == 0 ? kWidestName : style.width > others ? style.width - others : 0;
  return std::min(widest, std::max(room, kNarrowestName));
}

void TextTable::column(std::string label, Kind kind, std::size_t least, bool optional) {
  const std::size_t width = gradclip::columns(label);
  columns_.push_back({std::move(label), kind, least, optional, width});
}

void TextTable::row(std::vector<std::string> cells, Ink ink) {
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    columns_[c].width = std::max(columns_[c].width, gradclip::columns(cells[c]));
  }
  rows_.push_back({std::move(cells), ink});
}

/// What a column takes with its gap.
std::size_t TextTable::taken(std::size_t column) const {
  const Column& of = columns_[column];
  return std::max(of.width + (column == 0 ? 0 : kGap), of.least);
}

std::vector<std::size_t> TextTable::shown(const TextStyle& style) const {
  constexpr std::size_t kReadableName = 2 * kNarrowestName;
  std::vector<std::size_t> result(columns_.size());
  std::iota(result.begin(), result.end(), std::size_t{0});
  if (style.width == 0) return result;
  const auto too_wide = [&] {
    std::size_t all = 0;
    for (const std::size_t c : result) {
      all += columns_[c].kind == Kind::text ? std::min(taken(c), kReadableName + kGap) : taken(c);
    }
    return all > style.width;
  };
  for (std::size_t c = columns_.size(); c-- != 0 && too_wide();) {
    if (columns_[c].optional) std::erase(result, c);
  }
  return result;
}

std::string TextTable::left_out(const TextStyle& style) const {
  const std::vector<std::size_t> there = shown(style);
  std::vector<std::string> labels;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    if (std::find(there.begin(), there.end(), c) == there.end()) labels.push_back(columns_[c].label);
  }
  return comma_separated(labels);
}

void TextTable::write(std::ostream& out, const TextStyle& style, std::string_view indent) const {
  const std::vector<std::size_t> there = shown(style);
  std::vector<std::size_t> widths(columns_.size());
  std::size_t numbers = indent.size();
  std::vector<std::size_t> texts;
  for (const std::size_t c : there) {
    widths[c] = taken(c);
    if (columns_[c].kind == Kind::number) {
      numbers += widths[c];
    } else {
      texts.push_back(c);
      if (style.width == 0) widths[c] = std::min(widths[c], kWidestName + (c == 0 ? 0 : kGap));
    }
  }
  // The narrow texts first: what they leave is the wide ones'.
  std::stable_sort(texts.begin(), texts.end(), [&](std::size_t a, std::size_t b) { return widths[a] < widths[b]; });
  std::size_t room = style.width > numbers ? style.width - numbers : 0;
  for (std::size_t i = 0; style.width != 0 && i < texts.size(); ++i) {
    std::size_t& width = widths[texts[i]];
    const std::size_t gap = texts[i] == 0 ? 0 : kGap;
    width = std::min(width, std::max(room / (texts.size() - i), kNarrowestName + gap));
    room -= std::min(room, width);
  }

  std::vector<std::vector<std::string>> short_forms(columns_.size());
  for (const std::size_t c : texts) {
    for (const Row& row : rows_) short_forms[c].push_back(row.cells[c]);
    short_forms[c] = shortened_apart(short_forms[c], widths[c] - (c == 0 ? 0 : kGap));
  }
  const auto write_line = [&](Ink ink, const auto& cell_of) {
    std::string text(indent);
    for (const std::size_t c : there) {
      const std::string cell = cell_of(c);
      if (columns_[c].kind == Kind::number) {
        text += std::string(widths[c] - gradclip::columns(cell), ' ') + cell;
      } else {
        const std::size_t gap = c == 0 ? 0 : kGap;
        text += std::string(gap, ' ') + left(cell, widths[c] - gap);
      }
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out << paint(style, ink, text) << '\n';
  };
  write_line(Ink::faint, [&](std::size_t c) {
    const std::size_t gap = c == 0 ? 0 : kGap;
    return columns_[c].kind == Kind::number ? columns_[c].label : shortened(columns_[c].label, widths[c] - gap);
  });
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    write_line(rows_[r].ink, [&](std::size_t c) -> const std::string& {
      return columns_[c].kind == Kind::number ? rows_[r].cells[c] : short_forms[c][r];
    });
  }
}

}  // namespace gradclip
