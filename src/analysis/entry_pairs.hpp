#pragma once
// Which entry of a baseline each parameter of a dump is compared with: by name, where a name may stand several times.

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "gradclip/analysis/baseline.hpp"

namespace gradclip {

/// An entry among those of its name.
struct EntryPlace {
  std::size_t number = 1;       ///< from 1, on its own side
  std::size_t of_recorded = 0;  ///< how many the baseline has
  std::size_t of_measured = 0;  ///< how many the dump has
};

struct MeasuredEntry {
  std::optional<std::size_t> recorded;  ///< its counterpart; empty: an extra one
  EntryPlace place;
};

struct GoneEntry {
  std::size_t recorded;
  EntryPlace place;
};

struct EntryPairs {
  std::vector<MeasuredEntry> measured;  ///< one for each
  std::vector<GoneEntry> gone;          ///< in the baseline's order
};

/// Entries of one name keep their order. Where one side has fewer, each takes the first one left that fits, and only
/// where none does the first one left; what is then over is extra or gone. How many entries a tied weight has is a
/// matter of the layout: its later ones are neither as long as the other side has the name, and those of the dump are
/// compared with one that fits, else with the first.
/// @param fits  (recorded, measured): whether these may be the same
[[nodiscard]] EntryPairs pair_entries(
    const std::vector<BaselineParameter>& recorded, const std::vector<BaselineParameter>& measured,
    const std::function<bool(const BaselineParameter&, const BaselineParameter&)>& fits);

}  // namespace gradclip
