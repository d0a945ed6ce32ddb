#include <fmt/format.h>

#include <algorithm>
#include <ostream>

#include "gradclip/base/error.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostOfAKind = 20;

/// What there is to compare with.
std::string recorded_text(const Report& report) {
  const ReportVerification& checked = *report.verification;
  if (!checked.manifest_checksum && checked.file_checksums == 0 && checked.shard_checksums == 0) {
    return "none: nothing vouches for the bits";
  }
  const auto of = [](std::uint64_t some, std::uint64_t all, std::string_view one, std::string_view many) {
    if (some == all) return all == 1 ? fmt::format("the one {}", one) : fmt::format("all {} {}", grouped(all), many);
    return fmt::format("{} of {}", some == 0 ? "none" : grouped(some), counted(all, one, many));
  };
  return fmt::format(
      "recorded of {}, {}, {}", checked.manifest_checksum ? "the manifest" : "none of the manifest",
      of(checked.file_checksums, static_cast<std::uint64_t>(report.dump.world_size), "rank file", "rank files"),
      of(checked.shard_checksums, checked.shards, "gradient", "gradients"));
}

/// What comparing found; empty where there was nothing to compare.
std::string compared_text(const Report& report) {
  const DifferingChecksums differ = differing_checksums(report.findings);
  std::vector<std::string> parts;
  if (differ.manifest) parts.emplace_back("the manifest differs");
  if (report.verification->file_checksums != 0) {
    parts.push_back(fmt::format("{} compared, {}",
                                counted(report.verification->files_compared, "rank file", "rank files"),
                                differ.files == 0   ? "none differs"
                                : differ.files == 1 ? "1 differs"
                                                    : grouped(differ.files) + " differ"));
  }
  if (differ.gradients != 0) parts.push_back(counted(differ.gradients, "gradient differs", "gradients differ"));
  return comma_separated(parts);
}

void write_finding(const Finding& finding, std::ostream& out) {
  out << "  ";
  if (!finding.parameter.empty()) out << printable(finding.parameter) << ' ';
  if (finding.index) out << index_text(*finding.index) << ' ';
  if (!finding.ranks.empty()) out << '(' << ranks_text(finding.ranks) << ") ";
  out << printable(finding.message) << '\n';
}

}  // namespace

DifferingChecksums differing_checksums(std::span<const Finding> findings) noexcept {
  DifferingChecksums differ;
  for (const Finding& finding : findings) {
    if (finding.kind != "checksum") continue;
    if (!finding.parameter.empty()) {
      differ.gradients += finding.ranks.size();
    } else if (finding.ranks.empty()) {
      differ.manifest = true;
    } else {
      ++differ.files;
    }
  }
  return differ;
}

void write_verification(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportVerification& checked = *report.verification;
  if (checked.manifest) {
    write_head(report, style, out);
    if (!checked.complete) line(out, style, "manifest", "parts of it cannot be used and were left out", {}, Ink::alarm);
    line(out, style, "read",
         fmt::format("{}, {} in them", counted(checked.files, "rank file", "rank files"),
                     counted(checked.shards, "gradient", "gradients")));
    line(out, style, "checksums", recorded_text(report));
    if (const std::string compared = compared_text(report); !compared.empty()) line(out, style, "", compared);
  } else {
    out << paint(style, Ink::strong, "gradclip verify") << ' ' << printable(report.dump.path) << "\n\n";
    line(out, style, "read", "the manifest only: it cannot be used");
  }
  if (report.findings.empty()) {
    line(out, style, "findings", "none: clean", {}, Ink::strong);
    return;
  }
  line(out, style, "findings", grouped(report.findings.size()), {}, Ink::alarm);
  for (auto first = report.findings.begin(); first != report.findings.end();) {
    const auto last =
        std::find_if(first, report.findings.end(), [&](const Finding& f) { return f.kind != first->kind; });
    const auto count = static_cast<std::size_t>(last - first);
    out << '\n' << paint(style, Ink::warning, fmt::format("{} ({})", printable(first->kind), grouped(count))) << '\n';
    const std::size_t shown = std::min(count, kMostOfAKind);
    for (std::size_t i = 0; i < shown; ++i) write_finding(first[static_cast<std::ptrdiff_t>(i)], out);
    if (count > shown) {
      out << fmt::format("  ... and {} more: --report FILE.json has all\n", grouped(count - shown));
    }
    first = last;
  }
}

}  // namespace gradclip
