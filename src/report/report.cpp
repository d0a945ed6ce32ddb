#include "gradclip/report/report.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gradclip/norm/parameter_norms.hpp"

namespace gradclip {
namespace {

std::uint64_t add_saturating(std::uint64_t a, std::uint64_t b) noexcept {
  return a > std::numeric_limits<std::uint64_t>::max() - b ? std::numeric_limits<std::uint64_t>::max() : a + b;
}

std::uint64_t multiply_saturating(std::uint64_t a, std::uint64_t b) noexcept {
  return b != 0 && a > std::numeric_limits<std::uint64_t>::max() / b ? std::numeric_limits<std::uint64_t>::max()
                                                                     : a * b;
}

/// Local shards that hold each element: shards tile a tensor exactly once, copies and addends repeat it.
std::uint64_t times_stored(const Manifest& manifest, const ParameterEntry& parameter) {
  if (!parameter.mesh) return parameter.ranks.size();
  const DeviceMesh& mesh = manifest.meshes[*parameter.mesh];
  std::uint64_t times = 1;
  for (std::size_t d = 0; d < parameter.layout().size(); ++d) {
    const Placement::Kind kind = parameter.layout()[d].kind;
    if (kind == Placement::Kind::replicate || kind == Placement::Kind::partial) {
      times = multiply_saturating(times, static_cast<std::uint64_t>(mesh.shape()[d]));
    }
  }
  return times;
}

std::vector<std::string> texts(const std::vector<Placement>& placements) {
  std::vector<std::string> result;
  result.reserve(placements.size());
  for (const Placement& placement : placements) result.push_back(to_string(placement));
  return result;
}

std::vector<std::int64_t> unravel(std::uint64_t position, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> index(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    const auto extent = static_cast<std::uint64_t>(std::max<std::int64_t>(shape[d], 1));
    index[d] = static_cast<std::int64_t>(position % extent);
    position /= extent;
  }
  return index;
}

std::string copies_text(Copies copies) {
  switch (copies) {
    case Copies::replicated:
      return "replicated";
    case Copies::distinct:
      return "distinct";
    case Copies::undeclared:
      break;
  }
  return "undeclared";
}

ReportParameter declared(const Manifest& manifest, const ParameterEntry& entry, bool expert) {
  ReportParameter parameter;
  parameter.name = entry.name;
  parameter.model_part = entry.model_part;
  parameter.shape = entry.shape;
  parameter.dtype = entry.dtype;
  parameter.expert = expert;
  if (entry.gradient_placements && *entry.gradient_placements != entry.placements) {
    parameter.gradient_placements = texts(*entry.gradient_placements);
  }
  parameter.elements =
      entry.is_distinct(expert) ? multiply_saturating(entry.elements, entry.ranks.size()) : entry.elements;
  parameter.bytes =
      multiply_saturating(multiply_saturating(entry.elements, times_stored(manifest, entry)), size_of(entry.dtype));
  return parameter;
}

void measured(ReportParameter& parameter, const ParameterNorm& norm) {
  parameter.counted = norm.counted;
  parameter.none = norm.none;
  parameter.elements = norm.statistics.elements;
  parameter.norm = norm.norm;
  parameter.share = norm.share;
  parameter.statistics = statistics_of(norm.statistics);
  if (norm.statistics.first_nonfinite != kNowhere) {
    parameter.first_nonfinite =
        ReportPlace{unravel(norm.statistics.first_nonfinite, parameter.shape), norm.statistics.first_nonfinite_rank};
  }
}

/// Counts members into any of the report's groupings.
template <class Entry>
Entry summed(Entry entry, const std::vector<ReportParameter>& parameters, const std::vector<std::size_t>& members) {
  entry.parameters = members.size();
  for (const std::size_t member : members) {
    entry.elements = add_saturating(entry.elements, parameters[member].elements);
    entry.bytes = add_saturating(entry.bytes, parameters[member].bytes);
  }
  return entry;
}

template <class Entry>
void set_norms(std::vector<Entry>& entries, const std::vector<GroupNorm>& norms) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    entries[i].norm = norms[i].norm;
    entries[i].share = norms[i].share;
  }
}

/// What both kinds of report have: the dump, its parameters and their groupings, with norms where there are any.
Report base_report(std::string command, const std::filesystem::path& dump, const Manifest& manifest,
                   const std::vector<bool>& expert, const std::string& pp_axis_name, const NormResult* norm) {
  Report report;
  report.command = std::move(command);
  report.dump.path = dump.string();
  report.dump.step = manifest.step;
  report.dump.world_size = manifest.world_size;
  report.dump.parameters = manifest.parameters.size();
  report.parameters.reserve(manifest.parameters.size());
  for (std::size_t i = 0; i < manifest.parameters.size(); ++i) {
    ReportParameter& parameter = report.parameters.emplace_back(declared(manifest, manifest.parameters[i], expert[i]));
    report.dump.elements = add_saturating(report.dump.elements, parameter.elements);
    report.dump.bytes = add_saturating(report.dump.bytes, parameter.bytes);
    if (norm != nullptr) measured(parameter, norm->parameters[i]);
    if (norm != nullptr && norm->histograms) parameter.histogram = norm->histograms->parameters[i];
  }

  for (std::size_t m = 0; m < manifest.meshes.size(); ++m) {
    const DeviceMesh& mesh = manifest.meshes[m];
    const bool is_moe =
        std::find(manifest.moe_meshes.begin(), manifest.moe_meshes.end(), m) != manifest.moe_meshes.end();
    report.meshes.push_back(
        {mesh.name(), mesh.dim_names(), mesh.shape(), mesh.ranks(), manifest.device_mesh == m, is_moe});
  }
  const std::vector<ShardingGroup> groups = sharding_groups(manifest);
  for (const ShardingGroup& group : groups) {
    for (const std::size_t member : group.parameters) report.parameters[member].group = report.groups.size();
    ReportGroup entry;
    if (group.mesh) entry.mesh = manifest.meshes[*group.mesh].name();
    entry.placements = texts(group.placements);
    report.groups.push_back(summed(std::move(entry), report.parameters, group.parameters));
  }
  const std::vector<PipelineStage> stages = pipeline_stages(manifest, pp_axis_name);
  for (const PipelineStage& stage : stages) {
    ReportStage entry;
    entry.stage = stage.stage;
    entry.model_parts = stage.model_parts;
    report.stages.push_back(summed(std::move(entry), report.parameters, stage.parameters));
  }
  const std::vector<TypeGroup> types = type_groups(manifest);
  for (const TypeGroup& type : types) {
    ReportType entry;
    entry.dtype = type.dtype;
    report.dtypes.push_back(summed(entry, report.parameters, type.parameters));
  }
  if (norm != nullptr) {
    set_norms(report.groups, group_norms(*norm, groups));
    set_norms(report.stages, stage_norms(*norm, stages));
    set_norms(report.dtypes, dtype_norms(*norm, types));
  }
  return report;
}

std::optional<double> distance(double recorded, double total) {
  if (recorded == total || (std::isnan(recorded) && std::isnan(total))) return 0.0;
  if (!std::isfinite(recorded) || !std::isfinite(total) || recorded == 0.0) return std::nullopt;
  return std::abs(recorded - total) / std::abs(recorded);
}

ReportReference reference_of(const ReferenceView& view, const ClipResult& result, const TrainingRecord& training) {
  ReportReference reference;
  reference.arithmetic = view.arithmetic;
  reference.note = view.note;
  reference.recorded = training.grad_norm;
  const double type = training.norm_type.value_or(2.0);
  if (training.grad_norm && type != result.order.p) reference.recorded_type = type;
  const std::optional<double> comparable = reference.recorded_type ? std::nullopt : training.grad_norm;
  if (comparable) reference.recorded_distance = distance(*comparable, result.norm->total);
  for (std::size_t i = 0; i < view.totals.size(); ++i) {
    const RankTotal& seen = view.totals[i];
    ReportReferenceTotal& total = reference.totals.emplace_back();
    total.total = seen.total;
    total.ranks = seen.ranks;
    if (i < result.coefficients.size()) {
      total.coefficient = result.coefficients[i];
    } else if (result.max_norm) {
      total.coefficient = clip_coefficient(seen.total, *result.max_norm, seen.dtype, /*as_reference=*/true);
    }
    if (!comparable) continue;
    const std::optional<double> apart = distance(*comparable, seen.total);
    if (apart && (!reference.recorded_distance_reference || *apart < *reference.recorded_distance_reference)) {
      reference.recorded_distance_reference = apart;
      reference.recorded_nearest = i;
    }
  }
  return reference;
}

}  // namespace

ReportStatistics statistics_of(const TensorStatistics& tensor) {
  ReportStatistics statistics;
  statistics.elements = tensor.elements;
  statistics.max_abs = tensor.max_abs;
  if (std::isfinite(tensor.min_abs)) statistics.min_abs = tensor.min_abs;
  statistics.mean = tensor.mean();
  statistics.zeros = tensor.zeros;
  statistics.subnormals = tensor.subnormals;
  statistics.nan = tensor.nan;
  statistics.posinf = tensor.posinf;
  statistics.neginf = tensor.neginf;
  return statistics;
}

Report clip_report(std::string command, const std::filesystem::path& dump, const Manifest& manifest,
                   const TrainingStep& step, const ClipOptions& options, const ClipResult& result,
                   std::optional<std::string> output, ReportRun run) {
  const bool clips = command == "clip";
  const NormResult* norm = result.norm ? &*result.norm : nullptr;
  Report report = base_report(std::move(command), dump, manifest, result.scale.factors.expert, step.pp_axis_name, norm);
  report.output = std::move(output);
  report.run = std::move(run);
  report.scale = ReportScale{result.scale.label_token_divisor, result.scale.expert_divisor, result.scale.explanation};
  report.norm = ReportNorm{result.order.p, norm != nullptr ? norm->total : result.total, {}, {}};
  if (norm != nullptr) {
    report.norm->statistics = statistics_of(norm->statistics);
    if (norm->histograms) report.norm->histogram = norm->histograms->total;
    report.reference = reference_of(norm->reference, result, manifest.training);
    report.findings = norm->findings;
  }
  report.findings.insert(report.findings.end(), result.findings.begin(), result.findings.end());
  if (clips) {
    // What the policy kept the gradients from is not what they were multiplied by.
    const bool multiplied = !result.skipped && !result.refused;
    report.clip = ReportClip{result.max_norm,
                             !result.max_norm && manifest.training.max_grad_norm,
                             multiplied ? result.coefficient : std::nullopt,
                             result.clipped,
                             result.skipped,
                             std::string(name(options.nonfinite)),
                             result.total_after};
  }
  return report;
}

Report inspect_report(const std::filesystem::path& dump, const Manifest& manifest) {
  std::vector<bool> expert;
  expert.reserve(manifest.parameters.size());
  const std::string ep_axis_name = manifest.training.ep_axis_name.value_or("");
  for (const ParameterEntry& parameter : manifest.parameters) {
    expert.push_back(manifest.is_expert(parameter, ep_axis_name));
  }
  Report report =
      base_report("inspect", dump, manifest, expert, manifest.training.pp_axis_name.value_or("pp"), nullptr);

  ReportContents& contents = report.contents.emplace();
  contents.state = name(manifest.state);
  contents.producer = manifest.producer;
  contents.microbatch = manifest.microbatch;
  contents.training = manifest.training;
  contents.has_checksum = manifest.has_checksum;
  for (const auto& [file, record] : manifest.files) contents.files_with_checksum += record.xxh3_64.has_value() ? 1 : 0;
  for (std::size_t i = 0; i < manifest.parameters.size(); ++i) {
    const ParameterEntry& entry = manifest.parameters[i];
    if (!entry.mesh) contents.plain_tensors.push_back({i, copies_text(entry.copies), entry.ranks.size()});
  }
  return report;
}

Report verify_report(const std::filesystem::path& dump, const Manifest* manifest,
                     const ReportVerification& verification, std::vector<Finding> findings, ReportRun run) {
  Report report;
  report.command = "verify";
  report.dump.path = dump.string();
  if (manifest != nullptr) report.dump = report_dump(dump, *manifest);
  report.run = std::move(run);
  report.verification = verification;
  report.findings = std::move(findings);
  return report;
}

ReportDump report_dump(const std::filesystem::path& dump, const Manifest& manifest) {
  ReportDump head;
  head.path = dump.string();
  head.step = manifest.step;
  head.world_size = manifest.world_size;
  head.parameters = manifest.parameters.size();
  const std::string ep_axis_name = manifest.training.ep_axis_name.value_or("");
  for (const ParameterEntry& entry : manifest.parameters) {
    const ReportParameter parameter = declared(manifest, entry, manifest.is_expert(entry, ep_axis_name));
    head.elements = add_saturating(head.elements, parameter.elements);
    head.bytes = add_saturating(head.bytes, parameter.bytes);
  }
  return head;
}

std::optional<std::size_t> first_nonfinite_parameter(const Report& report) {
  for (std::size_t i = 0; i < report.parameters.size(); ++i) {
    const std::optional<ReportStatistics>& statistics = report.parameters[i].statistics;
    if (statistics && statistics->nonfinite() != 0) return i;
  }
  return std::nullopt;
}

}  // namespace gradclip
