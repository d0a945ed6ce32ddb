#include "gradclip/analysis/entry_pairs.hpp"

#include <algorithm>
#include <string_view>
#include <unordered_map>

namespace gradclip {
namespace {

using Places = std::vector<std::size_t>;

/// The entries of one name on both sides.
struct Namesakes {
  Places recorded, measured;
};

/// For each of `fewer` one of the `more` others, ascending.
template <class Fits>
Places counterparts(std::size_t fewer, std::size_t more, const Fits& fits) {
  Places taken;
  std::size_t next = 0;
  for (std::size_t i = 0; i < fewer; ++i) {
    const std::size_t end = more - (fewer - i) + 1;  // leaves one for each that follows
    std::size_t place = next;
    while (fewer != more && place != end && !fits(i, place)) ++place;
    if (place == end) place = next;
    taken.push_back(place);
    next = place + 1;
  }
  return taken;
}

}  // namespace

EntryPairs pair_entries(const std::vector<BaselineParameter>& recorded, const std::vector<BaselineParameter>& measured,
                        const std::function<bool(const BaselineParameter&, const BaselineParameter&)>& fits) {
  std::unordered_map<std::string_view, Namesakes> names;
  for (std::size_t i = 0; i < recorded.size(); ++i) names[recorded[i].name].recorded.push_back(i);
  for (std::size_t i = 0; i < measured.size(); ++i) names[measured[i].name].measured.push_back(i);

  EntryPairs pairs;
  pairs.measured.resize(measured.size());
  for (const auto& [name, both] : names) {
    const Places &r = both.recorded, &m = both.measured;
    for (std::size_t i = 0; i < m.size(); ++i) pairs.measured[m[i]].place = {i + 1, r.size(), m.size()};
    std::vector<bool> taken(r.size(), false);
    const auto pair = [&](std::size_t i, std::size_t j) {
      pairs.measured[m[j]].recorded = r[i];
      taken[i] = true;
    };
    if (r.size() <= m.size()) {
      const Places places = counterparts(
          r.size(), m.size(), [&](std::size_t i, std::size_t j) { return fits(recorded[r[i]], measured[m[j]]); });
      for (std::size_t i = 0; i < places.size(); ++i) pair(i, places[i]);
    } else {
      const Places places = counterparts(
          m.size(), r.size(), [&](std::size_t j, std::size_t i) { return fits(recorded[r[i]], measured[m[j]]); });
      for (std::size_t j = 0; j < places.size(); ++j) pair(places[j], j);
    }
    for (const std::size_t j : m) {
      if (pairs.measured[j].recorded || measured[j].counted || r.empty()) continue;
      const auto like =
          std::find_if(r.begin(), r.end(), [&, j](std::size_t i) { return fits(recorded[i], measured[j]); });
      pairs.measured[j].recorded = like == r.end() ? r.front() : *like;
    }
    for (std::size_t i = 0; i < r.size(); ++i) {
      if (taken[i] || (!recorded[r[i]].counted && !m.empty())) continue;
      pairs.gone.push_back({r[i], {i + 1, r.size(), m.size()}});
    }
  }
  std::sort(pairs.gone.begin(), pairs.gone.end(),
            [](const GoneEntry& a, const GoneEntry& b) { return a.recorded < b.recorded; });
  return pairs;
}

}  // namespace gradclip
