#include "suggestions.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace gradclip {
namespace {

constexpr std::size_t kLongestWord = 64;
constexpr std::size_t kLettersForAnError = 3;

/// Optimal string alignment: insertions, deletions, replacements and swaps of neighbours.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last, last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    before_last = std::exchange(last, row);
  }
  return last[b.size()];
}

}  // namespace

std::string nearest_name(std::string_view word, std::span<const std::string> names) {
  if (word.size() > kLongestWord) return {};
  std::size_t least = std::max<std::size_t>(word.size() / kLettersForAnError, 1) + 1;
  std::string nearest;
  for (const std::string& name : names) {
    const std::size_t apart = distance(word, name);
    if (apart >= least) continue;
    least = apart;
    nearest = name;
  }
  return nearest;
}

}  // namespace gradclip
