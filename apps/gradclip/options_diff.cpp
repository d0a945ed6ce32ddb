#include "options_diff.hpp"

namespace gradclip {

DiffOptions diff_options(const DiffLine& line) {
  DiffOptions options;
  options.rule = line.rule;
  options.max_elements = line.max_elements;
  if (line.map) options.names = NameMap::read(*line.map);
  if (line.only) options.only.emplace(*line.only, "--only");
  return options;
}

}  // namespace gradclip
