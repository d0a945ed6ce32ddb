#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ostream>

#include "gradclip/base/error.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostFindings = 20;

/// "12 bfloat16, 3 float32"
std::string types_text(const ReportMerge& merge) {
  std::array<std::uint64_t, kDTypeCount> of_type{};
  for (const ReportTensor& tensor : merge.tensors) {
    if (tensor.status == "written") ++of_type[static_cast<std::size_t>(tensor.dtype)];
  }
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < of_type.size(); ++i) {
    if (of_type[i] != 0) parts.push_back(fmt::format("{} {}", grouped(of_type[i]), name(static_cast<DType>(i))));
  }
  return comma_separated(parts);
}

void write_findings(const Report& report, const TextStyle& style, std::ostream& out) {
  if (report.findings.empty()) {
    line(out, style, "findings", "none");
    return;
  }
  line(out, style, "findings", grouped(report.findings.size()), {}, Ink::warning);
  for (std::size_t i = 0; i < report.findings.size(); ++i) {
    if (i == kMostFindings) {
      out << fmt::format("  ... and {} more: --report FILE.json has all\n", grouped(report.findings.size() - i));
      break;
    }
    const Finding& finding = report.findings[i];
    out << "  " << paint(style, Ink::warning, printable(finding.kind)) << ' ' << printable(finding.parameter);
    if (finding.index) out << ' ' << index_text(*finding.index);
    if (!finding.ranks.empty()) out << " (" << ranks_text(finding.ranks) << ')';
    out << ": " << printable(finding.message) << '\n';
  }
}

std::string not_kept_text(const ReportMerge& merge) {
  std::vector<std::string> parts;
  for (const std::string& part : merge.not_kept) {
    parts.push_back(part == "labels"     ? "labels (they are those of single ranks)"
                    : part == "training" ? "the step's training numbers"
                    : part == "moe_mesh" ? "the MoE mesh (experts are marked, but nothing has the expert divisor)"
                                         : part);
  }
  return comma_separated(parts);
}

}  // namespace

void write_merged(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportMerge& merge = *report.merge;
  write_head(report, style, out);
  const auto with_status = [&](std::string_view status) {
    return static_cast<std::uint64_t>(
        std::count_if(merge.tensors.begin(), merge.tensors.end(),
                      [status](const ReportTensor& tensor) { return tensor.status == status; }));
  };
  line(out, style, "tensors",
       fmt::format("{}, {}", grouped(with_status("written")), human_bytes(static_cast<double>(merge.bytes))),
       types_text(merge));
  if (const std::uint64_t none = with_status("none"); none != 0) {
    line(out, style, "none", grouped(none), "gradients that are None on every rank");
  }
  if (const std::uint64_t repeated = with_status("repeated"); repeated != 0) {
    line(out, style, "tied", grouped(repeated), "entries of weights that are written once");
  }
  write_findings(report, style, out);
  out << '\n';
  line(out, style, "output", printable(*report.output),
       merge.format == "dump" ? "a dump of one rank" : "a safetensors file");
  if (!merge.not_kept.empty()) line(out, style, "not kept", not_kept_text(merge));
  const ReportRun& run = *report.run;
  line(out, style, "time",
       fmt::format(
           "{}, {}/s of gradients", human_seconds(run.seconds_total),
           human_bytes(run.seconds_total > 0.0 ? static_cast<double>(report.dump.bytes) / run.seconds_total : 0.0)));
  line(out, style, "processes",
       fmt::format("{} with {}{}, {} at most of {} a process", run.processes, counted(run.threads, "thread", "threads"),
                   run.processes > 1 ? " each" : "", human_bytes(static_cast<double>(run.memory_peak_bytes)),
                   human_bytes(static_cast<double>(run.memory_budget_bytes))));
}

}  // namespace gradclip
