#include "gradclip/report/html_table.hpp"

#include <fmt/format.h>

#include <array>

#include "gradclip/dump/manifest.hpp"
#include "gradclip/report/text.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kWorthSearching = 6;

}  // namespace

void TableData::column(std::string_view label, Kind kind, std::string_view meaning) {
  has_text_ = has_text_ || kind == Kind::name || kind == Kind::text || kind == Kind::status;
  constexpr std::array<std::string_view, 6> kKinds{"name", "text", "status", "number", "count", "share"};
  columns_ += fmt::format("{}[{},{},{}]", columns_.empty() ? "" : ",", script_text(label),
                          script_text(kKinds[static_cast<std::size_t>(kind)]), script_text(meaning));
}

TableData& TableData::row() {
  data_ += rows_ == 0 ? "[" : "],\n[";
  ++rows_;
  first_cell_ = true;
  return *this;
}

TableData& TableData::put(std::string_view json) {
  if (!first_cell_) data_ += ',';
  first_cell_ = false;
  data_ += json;
  return *this;
}

TableData& TableData::cell(std::string_view text) {
  return put(script_text(text));
}

TableData& TableData::cell(double number) {
  return put(json_number(number));
}

TableData& TableData::cell(std::uint64_t count) {
  // What a script's numbers do not hold is text for it.
  constexpr std::uint64_t kExact = std::uint64_t{1} << 53;
  return put(count <= kExact ? fmt::to_string(count) : fmt::format("\"{}\"", count));
}

void TableData::write(Markup& html) const {
  const Tag table(html, "div", {{"class", "table"}, {"data-noun", noun_}});
  {
    const Tag controls(html, "div", {{"class", "controls"}});
    {
      Attributes attributes;
      if (rows_ < kWorthSearching || !has_text_) attributes.emplace_back("hidden", "hidden");
      const Tag search(html, "label", attributes);
      html.text("Search ");
      html.empty("input", {{"type", "search"},
                           {"spellcheck", "false"},
                           {"autocomplete", "off"},
                           {"placeholder", "words that must all occur"}});
    }
    html.element("output", {{"aria-live", "polite"}}, grouped(rows_) + " " + noun_);
    const Tag pages(html, "span", {{"class", "pages"}, {"hidden", "hidden"}});
    html.element("button", {{"type", "button"}, {"data-page", "previous"}}, "‹ Previous");
    html.element("button", {{"type", "button"}, {"data-page", "next"}}, "Next ›");
  }
  {
    const Tag scroll(html, "div", {{"class", "scroll"}, {"tabindex", "0"}, {"role", "region"}, {"aria-label", noun_}});
    const Tag rows(html, "table");
    html.element("thead", {}, "");
    html.element("tbody", {}, "");
  }
  html.element("noscript", {}, "The table needs scripts. The charts do not, and the JSON report has every number.");
  const Tag data(html, "script", {{"type", "application/json"}});
  html.verbatim(fmt::format("{{\"columns\":[{}],\n\"rows\":[{}{}]}}", columns_, data_, rows_ == 0 ? "" : "]"));
}

}  // namespace gradclip
