#include "gradclip/report/text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <numeric>
#include <ostream>

#include "gradclip/base/error.hpp"
#include "gradclip/report/names.hpp"
#include "gradclip/report/text_pieces.hpp"
#include "gradclip/report/text_table.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostFindings = 10;
constexpr std::size_t kMostRows = 20;  // of a list that the JSON has in full
constexpr double kWorthSaying = 1e-6;  // relative: above what float32 totals are apart
constexpr std::size_t kLargest = 3;

// ---------------------------------------------------------------------------------------------------------------------
// Lines that `clip` and `norms` share
// ---------------------------------------------------------------------------------------------------------------------

void write_total(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportNorm& norm = *report.norm;
  std::string remark = fmt::format("p = {}", norm.type);
  if (!norm.statistics) {
    remark += ", given by --total-norm: nothing was measured";
  } else if (norm.statistics->elements == 0) {
    remark += ", nothing was seen: no rank holds a gradient";
  }
  line(out, style, "total norm", fmt::format("{}", norm.total), remark,
       std::isfinite(norm.total) ? Ink::strong : Ink::alarm);
}

std::string distance_text(double distance) {
  return distance == 0.0 ? "0" : fmt::format("{:.1e}", distance);
}

void write_recorded(const Report& report, const TextStyle& style, std::ostream& out) {
  if (!report.reference || !report.reference->recorded) return;
  const ReportReference& reference = *report.reference;
  std::string remark = "logged by the training step";
  if (reference.recorded_type) remark += fmt::format("; of p = {}, so it is not compared", *reference.recorded_type);
  if (reference.recorded_distance) {
    remark += "; relative distance " + distance_text(*reference.recorded_distance);
    if (reference.recorded_distance_reference &&
        *reference.recorded_distance_reference < *reference.recorded_distance) {
      remark += fmt::format("; {} from what {} saw", distance_text(*reference.recorded_distance_reference),
                            ranks_text(reference.totals[*reference.recorded_nearest].ranks));
    }
  }
  line(out, style, "recorded", fmt::format("{}", *reference.recorded), remark);
}

void write_reference(const Report& report, const TextStyle& style, std::ostream& out) {
  if (!report.reference) return;
  const ReportReference& reference = *report.reference;
  std::size_t shown = 0;
  for (const ReportReferenceTotal& total : reference.totals) {
    const std::string_view label = shown == 0 ? "ranks saw" : "";
    if (++shown > kMostRows) {
      line(out, style, "", fmt::format("... and {} more", reference.totals.size() - kMostRows));
      break;
    }
    std::string remark = reference.totals.size() == 1 ? counted(total.ranks.size(), "rank", "ranks with one total")
                                                      : ranks_text(total.ranks);
    if (shown == 1) remark += fmt::format(", {} arithmetic", reference.arithmetic);
    const double apart = total.total / report.norm->total - 1.0;
    if (std::isfinite(apart) && std::abs(apart) > kWorthSaying) {
      remark += fmt::format(", {:.3g} % {} the total norm", 100.0 * std::abs(apart), apart > 0.0 ? "above" : "below");
    }
    if (reference.totals.size() > 1 && total.coefficient) {
      remark += fmt::format(", coefficient {:.9g}", *total.coefficient);
    }
    line(out, style, label, fmt::format("{}", total.total), remark,
         reference.totals.size() == 1 ? Ink::plain : Ink::warning);
  }
  if (!reference.note.empty()) line(out, style, "", printable(reference.note));
}

void write_scale(const Report& report, const TextStyle& style, std::ostream& out) {
  line(out, style, "scale", printable(report.scale->explanation));
}

void write_elements(const Report& report, const TextStyle& style, std::ostream& out) {
  const std::optional<ReportStatistics>& statistics = report.norm->statistics;
  if (!statistics || statistics->elements == 0) return;
  line(out, style, "elements", grouped(statistics->elements),
       fmt::format("{} zero ({}), {} subnormal, largest {:.6g}{}", grouped(statistics->zeros),
                   percent(static_cast<double>(statistics->zeros) / static_cast<double>(statistics->elements)),
                   grouped(statistics->subnormals), statistics->max_abs,
                   statistics->min_abs ? fmt::format(", smallest {:.6g}", *statistics->min_abs) : ""));
}

/// Parameters without a gradient: their rows are of nothing.
void write_none(const Report& report, const TextStyle& style, std::ostream& out) {
  constexpr std::size_t kMostNames = 5;
  std::vector<std::string> names;
  std::size_t count = 0;
  for (const ReportParameter& parameter : report.parameters) {
    if (!parameter.statistics || parameter.statistics->elements != 0 || parameter.none == 0) continue;
    if (++count <= kMostNames) names.push_back(printable(parameter.name));
  }
  if (count == 0) return;
  std::string text = counted(count, "parameter has", "parameters have") +
                     " no gradient on any rank: " + comma_separated(shortened_apart(names, kWidestName));
  if (count > kMostNames) text += fmt::format(", and {} more", grouped(count - kMostNames));
  line(out, style, "none", text);
}

std::string nonfinite_counts(const ReportStatistics& statistics) {
  std::vector<std::string> parts;
  if (statistics.nan != 0) parts.push_back(grouped(statistics.nan) + " NaN");
  if (statistics.posinf != 0) parts.push_back(grouped(statistics.posinf) + " +inf");
  if (statistics.neginf != 0) parts.push_back(grouped(statistics.neginf) + " -inf");
  return comma_separated(parts);
}

/// Whether it is one of the values that write_nonfinite() places: not replaced by 0, nor in a copy that does not count.
bool is_placed(const Report& report, const Finding& finding) {
  if (finding.kind != "nonfinite") return false;
  return std::any_of(report.parameters.begin(), report.parameters.end(), [&](const ReportParameter& parameter) {
    const std::optional<ReportPlace>& place = parameter.first_nonfinite;
    return parameter.statistics && parameter.statistics->nonfinite() != 0 && parameter.name == finding.parameter &&
           (!place || (finding.ranks == std::vector<std::int32_t>{place->rank} &&
                       finding.index.value_or(place->index) == place->index));
  });
}

void write_nonfinite(const Report& report, const TextStyle& style, std::ostream& out) {
  const std::optional<ReportStatistics>& statistics = report.norm->statistics;
  if (!statistics) return;
  if (!first_nonfinite_parameter(report)) {
    const bool elsewhere = has_kind(report.findings, "nonfinite");
    line(out, style, "non-finite", elsewhere ? "none that counts, but see the findings" : "none", {},
         elsewhere ? Ink::alarm : Ink::plain);
    return;
  }
  std::size_t parameters = 0;
  for (const ReportParameter& parameter : report.parameters) {
    parameters += parameter.statistics && parameter.statistics->nonfinite() != 0 ? 1 : 0;
  }
  std::string counts = nonfinite_counts(*statistics);
  if (statistics->nonfinite() != 0) {
    counts += fmt::format(" ({} of all)", part_text(statistics->nonfinite(), statistics->elements));
  }
  line(out, style, "non-finite",
       fmt::format("{} in {}, first in each:", counts.empty() ? "none that counts, but some" : counts,
                   counted(parameters, "parameter", "parameters")),
       {}, Ink::alarm);
  std::size_t shown = 0;
  for (const ReportParameter& parameter : report.parameters) {
    if (!parameter.statistics || parameter.statistics->nonfinite() == 0) continue;
    if (++shown > kMostFindings) {
      line(out, style, "", fmt::format("... and {} more", parameters - kMostFindings));
      break;
    }
    std::string place;
    if (parameter.first_nonfinite) {
      place = fmt::format("{} rank {} ", index_text(parameter.first_nonfinite->index), parameter.first_nonfinite->rank);
    }
    line(out, style, "",
         fmt::format("{} {}({})", printable(parameter.name), place, nonfinite_counts(*parameter.statistics)));
  }
}

/// What matters most where there is any, above a table that may be long.
void write_first_nonfinite(const Report& report, const TextStyle& style, std::ostream& out) {
  const std::optional<std::size_t> first = first_nonfinite_parameter(report);
  if (!first) return;
  const ReportParameter& parameter = report.parameters[*first];
  std::string place;
  if (parameter.first_nonfinite) {
    place =
        fmt::format(" {} on rank {}", index_text(parameter.first_nonfinite->index), parameter.first_nonfinite->rank);
  }
  out << paint(style, Ink::alarm,
               fmt::format("first NaN or infinity in model order: {}{} ({})", printable(parameter.name), place,
                           nonfinite_counts(*parameter.statistics)))
      << "\n\n";
}

void write_run(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportRun& run = *report.run;
  const auto bytes = [](std::uint64_t count) { return human_bytes(static_cast<double>(count)); };
  std::string speed;
  if (run.seconds_total > 0.0) {
    speed = fmt::format("{}/s of gradients", human_bytes(static_cast<double>(report.dump.bytes) / run.seconds_total));
  }
  std::string parts;
  if (run.seconds_of_a_thread) {
    parts = fmt::format(" (a thread: read {}, compute {}, write {})", human_seconds(run.seconds_of_a_thread->read),
                        human_seconds(run.seconds_of_a_thread->compute), human_seconds(run.seconds_of_a_thread->write));
  }
  line(out, style, "time", fmt::format("{}, {}{}", human_seconds(run.seconds_total), speed, parts));
  const auto described = [](const std::string& what, const std::string& detail, const std::string& reason) {
    std::string text = printable(what);
    if (!detail.empty()) text += fmt::format(" ({})", printable(detail));
    if (!reason.empty()) text += ": " + printable(reason);
    return text;
  };
  line(out, style, "device", described(run.device, run.device_detail, run.device_reason));
  line(out, style, "processes",
       fmt::format("{} with {}{}, {}", run.processes, counted(run.threads, "thread", "threads"),
                   run.processes > 1 ? " each" : "",
                   described(run.communicator, run.communicator_detail, run.communicator_reason)));
  std::string memory =
      fmt::format("{} at most, budget {} a process", bytes(run.memory_peak_bytes), bytes(run.memory_budget_bytes));
  if (run.device_memory_peak_bytes) {
    memory += fmt::format("; on the device {} at most", bytes(*run.device_memory_peak_bytes));
    if (run.device_memory_budget_bytes) memory += fmt::format(", budget {}", bytes(*run.device_memory_budget_bytes));
  }
  line(out, style, "memory", memory);
  if (run.offload) line(out, style, "offload", printable(*run.offload));
  if (run.kept_files) line(out, style, "resumed", fmt::format("{} rank files kept", *run.kept_files));
  if (run.locality) line(out, style, "locality", printable(*run.locality));
}

// ---------------------------------------------------------------------------------------------------------------------
// clip
// ---------------------------------------------------------------------------------------------------------------------

void write_coefficient(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportClip& clip = *report.clip;
  const std::string limit = clip.max_norm ? fmt::format("max norm {}", *clip.max_norm) : "";
  if (!clip.max_norm) {
    line(out, style, "coefficient", "none",
         clip.declined ? "nothing is clipped: --no-clip" : "nothing is clipped: no max norm was recorded or given");
  } else if (clip.skipped) {
    line(out, style, "coefficient", "none", limit + ": not clipped, the total is not finite (--nonfinite skip)",
         Ink::warning);
  } else if (!report.output) {
    line(out, style, "coefficient", "none", limit + ": nothing was written", Ink::alarm);
  } else if (!clip.coefficient) {
    line(out, style, "coefficient", "several", limit + ": every rank by the total it saw", Ink::warning);
  } else {
    line(out, style, "coefficient", fmt::format("{}", *clip.coefficient),
         limit + (clip.clipped               ? ": clipped"
                  : *clip.coefficient == 1.0 ? ": not exceeded"
                                             : ""),
         std::isfinite(*clip.coefficient) ? Ink::strong : Ink::alarm);
  }
  if (clip.total_after) {
    line(out, style, "total after", fmt::format("{}", *clip.total_after), "measured on what was written",
         std::isfinite(*clip.total_after) ? Ink::strong : Ink::alarm);
  }
}

void write_largest(const Report& report, const TextStyle& style, std::ostream& out) {
  constexpr std::size_t kBefore = 48;  // label, value, share
  if (!report.norm->statistics || report.norm->statistics->elements == 0) return;
  std::vector<std::size_t> largest = ordered_parameters(report, {ParameterOrder::norm, 0});
  std::erase_if(largest, [&](std::size_t i) { return !report.parameters[i].counted; });  // seen in its first entry
  largest.resize(std::min(largest.size(), kLargest));
  std::vector<std::string> names;
  std::size_t widest = 0;
  for (const std::size_t index : largest) {
    names.push_back(printable(report.parameters[index].name));
    widest = std::max(widest, columns(names.back()));
  }
  names = shortened_apart(names, std::max(name_columns(style, widest, kBefore), kNarrowestName));
  for (std::size_t i = 0; i < largest.size(); ++i) {
    const ReportParameter& parameter = report.parameters[largest[i]];
    line(out, style, i == 0 ? "largest" : "", fmt::format("{:.9g}", parameter.norm.value_or(0.0)),
         fmt::format("{:>8}  {}", percent(parameter.share.value_or(0.0)), names[i]));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tables
// ---------------------------------------------------------------------------------------------------------------------

/// The first `left_aligned` columns are text.
void write_table(std::ostream& out, const TextStyle& style, const std::vector<std::string>& header,
                 const std::vector<std::vector<std::string>>& rows, std::size_t left_aligned) {
  TextTable table;
  for (std::size_t c = 0; c < header.size(); ++c) {
    table.column(header[c], c < left_aligned ? TextTable::Kind::text : TextTable::Kind::number);
  }
  const std::size_t shown = std::min(rows.size(), kMostRows);
  for (std::size_t r = 0; r < shown; ++r) table.row(rows[r]);
  table.write(out, style, "  ");
  if (rows.size() > shown) out << fmt::format("  ... and {} more: --format json has all\n", rows.size() - shown);
}

template <class Entry>
std::vector<std::string> with_sums(std::vector<std::string> row, const Entry& entry) {
  row.push_back(grouped(entry.parameters));
  row.push_back(grouped(entry.elements));
  row.push_back(human_bytes(static_cast<double>(entry.bytes)));
  return row;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, " x "));
}

std::string training_text(const TrainingRecord& training) {
  std::vector<std::string> parts;
  const auto number = [&](std::string_view label, const auto& value) {
    if (value) parts.push_back(fmt::format("{} {}", label, *value));
  };
  const auto text = [&](std::string_view label, const std::optional<std::string>& value) {
    if (value) parts.push_back(fmt::format("{} {}", label, printable(*value)));
  };
  number("grad_norm", training.grad_norm);
  number("max_grad_norm", training.max_grad_norm);
  number("norm_type", training.norm_type);
  number("pp_enabled", training.pp_enabled);
  text("pp_axis_name", training.pp_axis_name);
  text("ep_axis_name", training.ep_axis_name);
  number("num_label_tokens", training.num_label_tokens);
  number("dp_group_size", training.dp_group_size);
  number("expert_tp_replication_factor", training.expert_tp_replication_factor);
  number("foreach", training.foreach);
  number("use_torch_clip_grad_norm", training.use_torch_clip_grad_norm);
  number("ignore_index", training.ignore_index);
  return parts.empty() ? "nothing recorded" : comma_separated(parts);
}

std::string checksum_text(const ReportContents& contents) {
  if (!contents.has_checksum && contents.files_with_checksum == 0) return "none: nothing vouches for the bits";
  return fmt::format("{}, {}", contents.has_checksum ? "manifest" : "none of the manifest",
                     counted(contents.files_with_checksum, "rank file", "rank files"));
}

void write_meshes(const Report& report, const TextStyle& style, std::ostream& out) {
  std::vector<std::vector<std::string>> rows;
  for (const ReportMesh& mesh : report.meshes) {
    if (rows.size() >= kMostRows) {
      rows.emplace_back();
      continue;
    }
    std::vector<std::string> dimensions;
    for (std::size_t d = 0; d < mesh.shape.size(); ++d) {
      dimensions.push_back(fmt::format("{} {}", printable(mesh.dim_names[d]), mesh.shape[d]));
    }
    std::vector<std::int32_t> ranks = mesh.ranks;
    std::sort(ranks.begin(), ranks.end());
    rows.push_back({printable(mesh.name), fmt::format("{}", fmt::join(dimensions, " x ")), rank_list(ranks),
                    comma_separated({mesh.device_mesh ? "device mesh" : "", mesh.moe_mesh ? "MoE mesh" : ""})});
  }
  if (rows.empty()) return;
  out << '\n' << paint(style, Ink::strong, "meshes") << '\n';
  write_table(out, style, {"name", "dimensions", "ranks", ""}, rows, 4);
}

void write_groupings(const Report& report, const TextStyle& style, std::ostream& out) {
  std::vector<std::vector<std::string>> rows;
  for (const ReportGroup& group : report.groups) {
    rows.push_back(with_sums(
        {group.mesh ? printable(*group.mesh) : "(plain tensors)", fmt::format("{}", fmt::join(group.placements, ", "))},
        group));
  }
  out << '\n' << paint(style, Ink::strong, "sharding groups") << '\n';
  write_table(out, style, {"mesh", "placements", "parameters", "elements", "bytes"}, rows, 2);

  rows.clear();
  for (const ReportStage& stage : report.stages) {
    rows.push_back(with_sums({stage.stage ? fmt::format("{}", *stage.stage) : "(none)",
                              fmt::format("{}", fmt::join(stage.model_parts, ", "))},
                             stage));
  }
  out << '\n' << paint(style, Ink::strong, "pipeline stages") << '\n';
  write_table(out, style, {"stage", "model parts", "parameters", "elements", "bytes"}, rows, 2);

  rows.clear();
  for (const ReportType& type : report.dtypes) rows.push_back(with_sums({std::string(name(type.dtype))}, type));
  out << '\n' << paint(style, Ink::strong, "types") << '\n';
  write_table(out, style, {"type", "parameters", "elements", "bytes"}, rows, 1);
}

void write_largest_by_size(const Report& report, const TextStyle& style, std::ostream& out) {
  std::vector<std::size_t> order(report.parameters.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const std::size_t rows_shown = std::min<std::size_t>(order.size(), 5);
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(rows_shown), order.end(),
                    [&](std::size_t a, std::size_t b) {
                      const std::uint64_t x = report.parameters[a].elements, y = report.parameters[b].elements;
                      return x != y ? x > y : a < b;
                    });
  std::vector<std::vector<std::string>> rows;
  for (std::size_t i = 0; i < rows_shown; ++i) {
    const ReportParameter& parameter = report.parameters[order[i]];
    rows.push_back({printable(parameter.name), shape_text(parameter.shape), std::string(name(parameter.dtype)),
                    grouped(parameter.elements)});
  }
  if (rows.empty()) return;
  out << '\n' << paint(style, Ink::strong, "largest parameters") << '\n';
  write_table(out, style, {"name", "shape", "type", "elements"}, rows, 3);
}

void write_plain_tensors(const Report& report, const TextStyle& style, std::ostream& out) {
  std::vector<std::vector<std::string>> rows;
  for (const ReportPlainTensor& tensor : report.contents->plain_tensors) {
    if (rows.size() >= kMostRows) {
      rows.emplace_back();
      continue;
    }
    rows.push_back({printable(report.parameters[tensor.parameter].name), tensor.copies, grouped(tensor.ranks)});
  }
  if (rows.empty()) return;
  out << '\n' << paint(style, Ink::strong, "plain tensors") << '\n';
  write_table(out, style, {"name", "copies", "ranks"}, rows, 2);
}

}  // namespace

void write_first_findings(const Report& report, const TextStyle& style, std::ostream& out) {
  if (report.findings.empty()) {
    line(out, style, "findings", "none");
    return;
  }
  // Non-finite values have lines of their own, unless they were replaced before anything was measured.
  const auto is_above = [&report](const Finding& finding) { return is_placed(report, finding); };
  const auto above = static_cast<std::size_t>(std::count_if(report.findings.begin(), report.findings.end(), is_above));
  const std::size_t others = report.findings.size() - above;
  line(out, style, "findings",
       grouped(report.findings.size()) + (above != 0 ? fmt::format(", {} of them above", grouped(above)) : ""), {},
       Ink::warning);
  std::size_t shown = 0;
  for (const Finding& finding : report.findings) {
    if (is_above(finding)) continue;
    if (++shown > kMostFindings) {
      out << fmt::format("  ... and {} more: --report FILE.json has all\n", others - kMostFindings);
      break;
    }
    out << "  " << paint(style, Ink::warning, printable(finding.kind));
    if (!finding.parameter.empty()) out << ' ' << printable(finding.parameter);
    if (finding.index) out << ' ' << index_text(*finding.index);
    if (!finding.ranks.empty()) out << " (" << ranks_text(finding.ranks) << ')';
    out << ": " << printable(finding.message) << '\n';
  }
}

void write_summary(const Report& report, const TextStyle& style, std::ostream& out) {
  write_head(report, style, out);
  write_total(report, style, out);
  write_recorded(report, style, out);
  write_reference(report, style, out);
  if (report.clip) write_coefficient(report, style, out);
  write_scale(report, style, out);
  write_elements(report, style, out);
  write_none(report, style, out);
  write_largest(report, style, out);
  write_nonfinite(report, style, out);
  write_first_findings(report, style, out);
  out << '\n';
  if (report.output) line(out, style, "output", printable(*report.output));
  write_run(report, style, out);
}

void write_norms(const Report& report, const TableOptions& options, const TextStyle& style, std::ostream& out) {
  write_head(report, style, out);
  write_first_nonfinite(report, style, out);
  write_norms_table(report, options, style, out);
  out << '\n';
  if (report.norm->histogram) write_histograms(report, options, style, out);

  write_total(report, style, out);
  write_recorded(report, style, out);
  write_reference(report, style, out);
  write_scale(report, style, out);
  write_elements(report, style, out);
  write_none(report, style, out);
  write_nonfinite(report, style, out);
  write_first_findings(report, style, out);
  out << '\n';
  write_run(report, style, out);
}

void write_sweep(const Report& report, const TextStyle& style, std::ostream& out) {
  write_sweep_tables(report, style, out);
  write_first_findings(report, style, out);
  out << '\n';
  write_run(report, style, out);
}

void write_contents(const Report& report, const TextStyle& style, std::ostream& out) {
  write_head(report, style, out);
  const ReportContents& contents = *report.contents;
  line(out, style, "state", contents.state);
  if (contents.microbatch) {
    line(out, style, "microbatch",
         fmt::format("{} of {}: gradients before they were synchronised", contents.microbatch->index,
                     contents.microbatch->count));
  }
  line(out, style, "recorded by", contents.producer.empty() ? "unknown" : printable(contents.producer));
  line(out, style, "training", training_text(contents.training));
  line(out, style, "checksums", checksum_text(contents));
  write_meshes(report, style, out);
  write_groupings(report, style, out);
  write_largest_by_size(report, style, out);
  write_plain_tensors(report, style, out);
}

void write_facts(const FactSheet& sheet, const TextStyle& style, std::ostream& out) {
  std::size_t width = 0;
  for (const FactSection& section : sheet.sections) {
    for (const Fact& fact : section.facts) width = std::max(width, columns(fact.name));
  }
  std::string_view gap;
  for (const FactSection& section : sheet.sections) {
    out << gap << paint(style, Ink::strong, section.name) << '\n';
    for (const Fact& fact : section.facts) {
      out << "  " << paint(style, Ink::faint, left(fact.name, width)) << "  " << printable(fact.text) << '\n';
    }
    gap = "\n";
  }
}

std::string human_bytes(double bytes) {
  constexpr std::array<std::string_view, 6> kUnits{"B", "kB", "MB", "GB", "TB", "PB"};
  std::size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < kUnits.size()) {
    bytes /= 1000.0;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.{}f} {}", bytes, bytes < 9.995 ? 2 : bytes < 99.95 ? 1 : 0, kUnits[unit]);
}

std::string human_seconds(double seconds) {
  if (seconds == 0.0) return "0 s";
  if (seconds < 0.00995) return fmt::format("{:.2f} ms", seconds * 1000.0);
  if (seconds < 0.0995) return fmt::format("{:.0f} ms", seconds * 1000.0);
  if (seconds < 9.95) return fmt::format("{:.2f} s", seconds);
  if (seconds < 119.5) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<std::uint64_t>(std::llround(seconds));
  if (whole < 7200) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole / 60 % 60);
}

std::string grouped(std::uint64_t number) {
  const std::string digits = fmt::to_string(number);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i != 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string rank_list(std::span<const std::int32_t> ranks, std::size_t runs) {
  std::string text;
  std::size_t shown = 0;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (shown++ != 0) text += ", ";
    if (shown > runs) return text + fmt::format("..., {} in all", grouped(ranks.size()));
    text += fmt::to_string(ranks[i]);
    if (end - i == 2) text += ", " + fmt::to_string(ranks[end - 1]);
    if (end - i > 2) text += "-" + fmt::to_string(ranks[end - 1]);
    i = end;
  }
  return text;
}

std::size_t columns(std::string_view text) noexcept {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }));
}

std::string shortened(std::string_view text, std::size_t width) {
  std::vector<std::size_t> starts;  // of each character
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0u) != 0x80u) starts.push_back(i);
  }
  if (starts.size() <= width) return std::string(text);
  const std::size_t tail = (width - 3) / 2;
  const std::size_t head = width - 3 - tail;
  std::string result(text.substr(0, starts[head]));
  result += "...";
  result += text.substr(starts[starts.size() - tail]);
  return result;
}

}  // namespace gradclip
