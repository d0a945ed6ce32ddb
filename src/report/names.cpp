#include "gradclip/report/names.hpp"

#include <algorithm>
#include <map>

#include "gradclip/report/text.hpp"

namespace gradclip {
namespace {

constexpr std::string_view kGap = "...";

/// Text as characters, so that cuts fall between them.
std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> result;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i + 1;
    while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0u) == 0x80u) ++end;
    result.push_back(text.substr(i, end - i));
    i = end;
  }
  return result;
}

std::string join(const std::vector<std::string_view>& text, std::size_t begin, std::size_t end) {
  std::string result;
  for (std::size_t i = begin; i < end; ++i) result += text[i];
  return result;
}

/// Beginning, the surroundings of character `at`, end. @pre text is longer than width, width >= 15
std::string around(const std::vector<std::string_view>& text, std::size_t at, std::size_t width) {
  constexpr std::size_t kBefore = 2;
  const std::size_t kept = width - 2 * kGap.size();
  const std::size_t head = kept / 4, window = kept / 2, tail = kept - head - window;
  const std::size_t begin =
      std::clamp(at > kBefore ? at - kBefore : 0, head, std::max(head, text.size() - tail - window));
  std::string result = join(text, 0, head);
  if (begin > head) result += kGap;
  result += join(text, begin, begin + window);
  if (begin + window < text.size() - tail) result += kGap;
  return result + join(text, text.size() - tail, text.size());
}

/// Where the texts, which all differ, first differ from one another.
std::size_t first_difference(const std::vector<std::vector<std::string_view>>& texts) {
  std::size_t at = 0;
  const auto same = [&](const std::vector<std::string_view>& text) {
    return at < text.size() && at < texts[0].size() && text[at] == texts[0][at];
  };
  while (std::all_of(texts.begin(), texts.end(), same)) ++at;
  return at;
}

}  // namespace

std::string_view module_of(std::string_view parameter, std::optional<std::size_t> depth) {
  const std::size_t last = parameter.rfind('.');
  if (last == std::string_view::npos) return {};
  const std::string_view module = parameter.substr(0, last);
  if (!depth) return module;
  std::size_t end = 0;
  for (std::size_t level = 0; level < *depth; ++level) {
    end = module.find('.', level == 0 ? 0 : end + 1);
    if (end == std::string_view::npos) return module;
  }
  return module.substr(0, end);
}

std::vector<std::string> shortened_apart(const std::vector<std::string>& texts, std::size_t width) {
  constexpr std::size_t kLeastWidth = 15;  // for three parts and two gaps
  std::vector<std::string> result;
  std::map<std::string, std::vector<std::size_t>> by_short_form;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    result.push_back(shortened(texts[i], width));
    if (result[i] != texts[i]) by_short_form[result[i]].push_back(i);
  }
  if (width < kLeastWidth) return result;
  for (const auto& [form, members] : by_short_form) {
    std::vector<std::vector<std::string_view>> distinct;
    std::vector<std::string> seen;
    for (const std::size_t i : members) {
      if (std::find(seen.begin(), seen.end(), texts[i]) != seen.end()) continue;
      seen.push_back(texts[i]);
      distinct.push_back(characters(texts[i]));
    }
    if (distinct.size() < 2) continue;
    const std::size_t at = first_difference(distinct);
    for (const std::size_t i : members) {
      const std::vector<std::string_view> text = characters(texts[i]);
      result[i] = around(text, at, width);
    }
  }
  return result;
}

}  // namespace gradclip
