#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unordered_map>

#include "gradclip/norm/parameter_norms.hpp"
#include "gradclip/report/names.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {
namespace {

ReportViewLine line_of(std::string name, const NormResult& result, const std::vector<std::size_t>& parameters) {
  const GroupNorm norm = norm_of(result, parameters);
  ReportViewLine line{std::move(name), parameters.size(), norm.norm, norm.share, statistics_of(norm.statistics), {}};
  if (result.histograms) {
    line.histogram.emplace();
    for (const std::size_t p : parameters) {
      if (result.parameters[p].counted) line.histogram->add(result.histograms->parameters[p]);
    }
  }
  return line;
}

std::vector<ReportViewLine> by_module(std::optional<std::size_t> depth, const Manifest& manifest,
                                      const NormResult& result) {
  std::vector<std::string> names;  // in the order of their first parameters
  std::vector<std::vector<std::size_t>> members;
  std::unordered_map<std::string, std::size_t> known;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const std::string module(module_of(manifest.parameters[p].name, depth));
    const auto [place, is_new] = known.emplace(module, names.size());
    if (is_new) {
      names.push_back(module);
      members.emplace_back();
    }
    members[place->second].push_back(p);
  }
  std::vector<ReportViewLine> lines;
  for (std::size_t i = 0; i < names.size(); ++i) lines.push_back(line_of(names[i], result, members[i]));
  return lines;
}

std::vector<ReportViewLine> by_group(const Manifest& manifest, const NormResult& result) {
  std::vector<ReportViewLine> lines;
  for (const ShardingGroup& group : sharding_groups(manifest)) {
    std::string name = "(plain tensors)";
    if (group.mesh) name = manifest.meshes[*group.mesh].name() + ' ' + to_string(group.placements);
    lines.push_back(line_of(std::move(name), result, group.parameters));
  }
  return lines;
}

std::vector<ReportViewLine> by_stage(const Manifest& manifest, const TrainingStep& step, const NormResult& result) {
  std::vector<ReportViewLine> lines;
  for (const PipelineStage& stage : pipeline_stages(manifest, step.pp_axis_name)) {
    lines.push_back(line_of(stage.stage ? fmt::to_string(*stage.stage) : "(none)", result, stage.parameters));
  }
  return lines;
}

std::vector<ReportViewLine> by_dtype(const Manifest& manifest, const NormResult& result) {
  std::vector<ReportViewLine> lines;
  for (const TypeGroup& type : type_groups(manifest)) {
    lines.push_back(line_of(std::string(name(type.dtype)), result, type.parameters));
  }
  return lines;
}

std::vector<std::uint64_t> parameters_by_rank(const Manifest& manifest) {
  std::vector<std::uint64_t> of_mesh(manifest.meshes.size(), 0);
  std::vector<std::uint64_t> of_rank(static_cast<std::size_t>(manifest.world_size), 0);
  for (const ParameterEntry& entry : manifest.parameters) {
    if (entry.mesh) ++of_mesh[*entry.mesh];
    for (const std::int32_t rank : entry.ranks) ++of_rank[static_cast<std::size_t>(rank)];
  }
  for (std::size_t m = 0; m < of_mesh.size(); ++m) {
    for (const std::int32_t rank : manifest.meshes[m].ranks()) of_rank[static_cast<std::size_t>(rank)] += of_mesh[m];
  }
  return of_rank;
}

std::vector<ReportViewLine> by_rank(const Manifest& manifest, const NormResult& result) {
  const std::vector<std::uint64_t> parameters = parameters_by_rank(manifest);
  std::vector<ReportViewLine> lines;
  for (std::int32_t rank = 0; rank < manifest.world_size; ++rank) {
    const auto counted = result.ranks.find(rank);
    const TensorStatistics statistics = counted == result.ranks.end() ? TensorStatistics{} : counted->second;
    const double norm = statistics.norm(result.order);
    lines.push_back({fmt::to_string(rank),
                     parameters[static_cast<std::size_t>(rank)],
                     norm,
                     share_of(norm, result.total, result.order),
                     statistics_of(statistics),
                     {}});
  }
  return lines;
}

}  // namespace

std::string_view name(ViewBy by) noexcept {
  switch (by) {
    case ViewBy::parameter:
      return "parameter";
    case ViewBy::module:
      return "module";
    case ViewBy::group:
      return "group";
    case ViewBy::stage:
      return "stage";
    case ViewBy::dtype:
      return "dtype";
    case ViewBy::rank:
      return "rank";
  }
  return "";
}

ReportView view_of(ViewBy by, std::optional<std::size_t> depth, const Manifest& manifest, const TrainingStep& step,
                   const NormResult& result) {
  ReportView view{by, by == ViewBy::module ? depth : std::nullopt, {}};
  switch (by) {
    case ViewBy::parameter:
      break;
    case ViewBy::module:
      view.lines = by_module(depth, manifest, result);
      break;
    case ViewBy::group:
      view.lines = by_group(manifest, result);
      break;
    case ViewBy::stage:
      view.lines = by_stage(manifest, step, result);
      break;
    case ViewBy::dtype:
      view.lines = by_dtype(manifest, result);
      break;
    case ViewBy::rank:
      view.lines = by_rank(manifest, result);
      break;
  }
  return view;
}

}  // namespace gradclip
