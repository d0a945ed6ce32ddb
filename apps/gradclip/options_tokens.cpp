#include "options_tokens.hpp"

namespace gradclip {

LabelOptions label_options(const LabelLine& line, const std::optional<std::string>& pp_axis,
                           const TrainingRecord& recorded) {
  LabelOptions options;
  options.ignore_index = line.ignore_index.value_or(recorded.ignore_index.value_or(kIgnoreIndex));
  options.dp_axes = line.dp_axes;
  options.pp_axis_name = pp_axis.value_or(recorded.pp_axis_name.value_or("pp"));
  return options;
}

std::vector<std::string> parse_axes(std::string_view text) {
  std::vector<std::string> axes;
  for (;;) {
    const std::size_t end = text.find(',');
    if (end == 0 || text.empty()) return {};
    axes.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return axes;
    text.remove_prefix(end + 1);
  }
}

}  // namespace gradclip
