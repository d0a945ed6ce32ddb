#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "gradclip/report/html_columns.hpp"
#include "gradclip/report/html_figures.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostGrids = 12;
constexpr std::size_t kMostBuckets = 64;

/// The extents that are drawn: of the first dimensions as much as keeps the cells within kMostCells.
std::vector<std::int64_t> drawn_shape(std::vector<std::int64_t> shape) {
  const auto most = static_cast<std::int64_t>(kMostCells);
  std::int64_t cells = 1;
  for (const std::int64_t extent : shape) cells *= extent;
  for (std::int64_t& extent : shape) {
    if (cells <= most) break;
    const std::int64_t others = cells / extent;
    extent = std::clamp<std::int64_t>(most / others, 1, extent);
    cells = others * extent;
  }
  return shape;
}

/// Calls with the coordinates of each drawn cell and the rank there.
template <class Take>
void for_each_rank(const PageMesh& mesh, const std::vector<std::int64_t>& drawn, const Take& take) {
  std::vector<std::int64_t> at(drawn.size(), 0);
  for (bool more = true; more;) {
    std::size_t position = 0;
    for (std::size_t d = 0; d < at.size(); ++d) {
      position = position * static_cast<std::size_t>(mesh.shape[d]) + static_cast<std::size_t>(at[d]);
    }
    take(at, mesh.ranks[position]);
    more = false;
    for (std::size_t d = at.size(); d-- > 0 && !more;) {
      more = ++at[d] < drawn[d];
      if (!more) at[d] = 0;
    }
  }
}

std::string coordinates_text(const PageMesh& mesh, const std::vector<std::int64_t>& at) {
  std::string text;
  for (std::size_t d = 0; d < at.size(); ++d)
    text += fmt::format("{}{} {}", d == 0 ? "" : ", ", mesh.dim_names[d], at[d]);
  return text;
}

/// What a rank holds of a group's tensors.
struct Holding {
  std::int64_t shard = 0;
  std::int64_t shards = 1;
  bool addend = false;
  std::string text;
};

Holding holding_of(const PageMesh& mesh, const std::vector<Placement>& placements,
                   const std::vector<std::int64_t>& at) {
  Holding holding;
  for (std::size_t d = 0; d < at.size(); ++d) {
    const std::int64_t extent = mesh.shape[d];
    std::string what;
    switch (placements[d].kind) {
      case Placement::Kind::replicate:
        what = "copy";
        break;
      case Placement::Kind::partial:
        what = "addend";
        holding.addend = true;
        break;
      default:
        what = "part";
        holding.shard = holding.shard * extent + at[d];
        holding.shards *= extent;
    }
    holding.text +=
        fmt::format("\n{}: {}, {} {} of {}", mesh.dim_names[d], to_string(placements[d]), what, at[d] + 1, extent);
  }
  return holding;
}

std::string not_drawn(const PageMesh& mesh, const std::vector<std::int64_t>& drawn) {
  if (mesh.shape == drawn) return {};
  std::size_t cells = 1;
  for (const std::int64_t extent : drawn) cells *= static_cast<std::size_t>(extent);
  return fmt::format(" The first {} of {} ranks are drawn.", grouped(cells), grouped(mesh.ranks.size()));
}

void write_group(Markup& html, const PageReport& report, const PagePart& group,
                 const std::unordered_set<std::int32_t>& with_findings) {
  const PageMesh& mesh = report.meshes[*group.mesh];
  RankGrid grid;
  grid.description = "Who holds what of " + group.name;
  grid.dim_names = mesh.dim_names;
  grid.shape = drawn_shape(mesh.shape);
  std::int64_t shards = 1;
  bool addends = false;
  for_each_rank(mesh, grid.shape, [&](const std::vector<std::int64_t>& at, std::int32_t rank) {
    const Holding holding = holding_of(mesh, group.placements, at);
    shards = holding.shards;
    addends = addends || holding.addend;
    const bool found = with_findings.count(rank) != 0;
    const std::int64_t shade = holding.shards == 1 ? 1 : holding.shard * 6 / (holding.shards - 1);
    grid.cells.push_back(
        {fmt::to_string(rank),
         fmt::format("rank {} ({})\nshard {} of {}{}{}", rank, coordinates_text(mesh, at), holding.shard + 1,
                     holding.shards, holding.text, found ? "\nnamed by a finding" : ""),
         fmt::format("s{}{}", shade, holding.addend ? " addend" : ""), found});
  });
  std::string explanation =
      fmt::format("{}, {} elements{}. ", counted(group.parameters, "parameter", "parameters"), grouped(group.elements),
                  group.norm ? ", norm " + short_number(*group.norm) : "");
  explanation += shards == 1 ? "Every rank holds the whole."
                             : fmt::format("{} shards; ranks of one colour hold the same one.",
                                           grouped(static_cast<std::uint64_t>(shards)));
  if (addends) explanation += " Dashed: addends that are yet to be reduced.";
  explanation += not_drawn(mesh, grid.shape);
  write_figure(html, group.name, explanation, [&] { write_rank_grid(html, grid); });
}

}  // namespace

void write_rank_totals(Markup& html, const PageReport& report) {
  if (report.totals.size() < 2) return;
  const auto device_mesh =
      std::find_if(report.meshes.begin(), report.meshes.end(), [](const PageMesh& mesh) { return mesh.device_mesh; });
  if (device_mesh == report.meshes.end()) return;
  std::unordered_map<std::int32_t, std::size_t> total_of;
  for (std::size_t t = 0; t < report.totals.size(); ++t) {
    for (const std::int32_t rank : report.totals[t].ranks) total_of.emplace(rank, t);
  }
  RankGrid grid;
  grid.description = "The total that each rank would have used";
  grid.dim_names = device_mesh->dim_names;
  grid.shape = drawn_shape(device_mesh->shape);
  for_each_rank(*device_mesh, grid.shape, [&](const std::vector<std::int64_t>& at, std::int32_t rank) {
    const auto seen = total_of.find(rank);
    const std::string place = fmt::format("rank {} ({})", rank, coordinates_text(*device_mesh, at));
    if (seen == total_of.end()) {
      grid.cells.push_back({fmt::to_string(rank), place + "\nno total", "none", false});
      return;
    }
    const std::size_t last = report.totals.size() - 1;
    grid.cells.push_back({fmt::to_string(rank),
                          fmt::format("{}\ntotal {}", place, exact_number(report.totals[seen->second].total)),
                          fmt::format("s{}", seen->second * 6 / last), false});
  });
  write_figure(html, "Totals on the device mesh",
               "Ranks of one colour would have used the same total." + not_drawn(*device_mesh, grid.shape),
               [&] { write_rank_grid(html, grid); });
}

void write_sharding(Markup& html, const PageReport& report) {
  std::unordered_set<std::int32_t> with_findings;
  for (const Finding& finding : report.findings) {
    // One that concerns every rank points at none.
    if (finding.ranks.size() >= report.dump.world_size) continue;
    with_findings.insert(finding.ranks.begin(), finding.ranks.end());
  }
  std::vector<const PagePart*> groups;
  for (const PagePart& group : report.groups) {
    if (group.mesh) groups.push_back(&group);
  }
  if (groups.empty()) return;
  {
    const Tag grids(html, "div", {{"class", "grids"}});
    for (std::size_t g = 0; g < std::min(groups.size(), kMostGrids); ++g) {
      write_group(html, report, *groups[g], with_findings);
    }
  }
  if (groups.size() > kMostGrids) {
    html.element("p", {{"class", "note"}},
                 fmt::format("{} more groups are not drawn.", grouped(groups.size() - kMostGrids)));
  }
}

void write_finding_ranks(Markup& html, const PageReport& report) {
  std::uint64_t world = report.dump.world_size;
  std::vector<std::string> kinds;
  for (const Finding& finding : report.findings) {
    if (finding.ranks.empty()) continue;
    for (const std::int32_t rank : finding.ranks) world = std::max(world, static_cast<std::uint64_t>(rank) + 1);
    if (std::find(kinds.begin(), kinds.end(), finding.kind) == kinds.end()) kinds.push_back(finding.kind);
  }
  // Findings that concern every rank tell none from another.
  const bool any_apart = std::any_of(report.findings.begin(), report.findings.end(), [&](const Finding& finding) {
    return !finding.ranks.empty() && finding.ranks.size() < world;
  });
  if (!any_apart) return;
  const std::uint64_t together = (world + kMostBuckets - 1) / kMostBuckets;
  const std::uint64_t buckets = (world + together - 1) / together;
  std::vector<std::vector<std::uint64_t>> counts(kinds.size(), std::vector<std::uint64_t>(buckets, 0));
  for (const Finding& finding : report.findings) {
    const auto kind = static_cast<std::size_t>(std::find(kinds.begin(), kinds.end(), finding.kind) - kinds.begin());
    // A finding counts once for a bucket, however many of its ranks are in it; ranks ascend.
    std::uint64_t last = buckets;
    for (const std::int32_t rank : finding.ranks) {
      const std::uint64_t bucket = static_cast<std::uint64_t>(rank) / together;
      if (bucket != last) ++counts[kind][bucket];
      last = bucket;
    }
  }
  HeatMap map;
  map.description = "Findings by kind and rank";
  map.x_title = "recorded ranks";
  map.common_scale = true;
  map.least_class = 2;
  std::vector<std::string> names;
  for (std::uint64_t b = 0; b < buckets; ++b) {
    const std::uint64_t first = b * together, last = std::min(world, first + together) - 1;
    map.columns.push_back({fmt::to_string(first), {}});
    names.push_back(first == last ? fmt::format("rank {}", first) : fmt::format("ranks {} to {}", first, last));
  }
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    HeatMap::Row& row = map.rows.emplace_back();
    row.label = kinds[k];
    std::uint64_t most = 0;
    for (std::uint64_t b = 0; b < buckets; ++b) {
      const std::uint64_t count = counts[k][b];
      most = std::max(most, count);
      row.values.push_back(count == 0 ? std::nullopt : std::optional(static_cast<double>(count)));
      row.tips.push_back(fmt::format("{}\n{}: {}", names[b], kinds[k], counted(count, "finding", "findings")));
    }
    row.low = row.high = "up to " + grouped(most);
  }
  write_figure(html, "Findings by rank", "How many findings of each kind name a rank; an empty cell is none.",
               [&] { write_heat_map(html, map); });
}

}  // namespace gradclip
