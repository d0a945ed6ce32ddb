#include <algorithm>
#include <sstream>

#include "expectations.hpp"
#include "gradclip/report/html.hpp"
#include "targets.hpp"

namespace gradclip::fuzz {
namespace {

std::size_t occurrences(std::string_view text, std::string_view word) {
  std::size_t count = 0;
  for (std::size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

}  // namespace

void report(std::string_view text) {
  reads([&] {
    std::ostringstream page;
    write_html(text, "report", page);
    const std::string html = page.str();
    require(is_valid_utf8(html), "a page is UTF-8");
    const std::size_t scripts = occurrences(html, "<script");
    require(occurrences(html, "<script>") == 1 && occurrences(html, "<style") == 1, "a page has its own script alone");
    require(occurrences(html, "<script>") + occurrences(html, "<script type=\"application/json\"") == scripts,
            "all else is data");
    require(occurrences(html, "</script") == scripts, "data cannot end its element");
    require(occurrences(html, "<iframe") == 0 && occurrences(html, "<img") == 0, "a page loads nothing");
    require(std::none_of(html.begin(), html.end(),
                         [](char c) { return static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t'; }),
            "a page has no control characters");
  });
}

}  // namespace gradclip::fuzz
