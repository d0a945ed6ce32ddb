#include "expectations.hpp"
#include "gradclip/analysis/baseline.hpp"
#include "gradclip/analysis/name_map.hpp"
#include "targets.hpp"

namespace gradclip::fuzz {

/// The first line is a name, the rest the map.
void name_map(std::string_view text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  const std::string name(text.substr(0, end));
  const std::string rules(text.substr(std::min(end + 1, text.size())));
  reads([&] { static_cast<void>(NameMap::parse(rules, "map").mapped(name)); });
}

void baseline(std::string_view text) {
  reads([&] {
    const std::string written = baseline_text(parse_baseline(std::string(text), "baseline"));
    require(baseline_text(parse_baseline(written, "baseline")) == written, "what is written reads back");
  });
}

}  // namespace gradclip::fuzz
