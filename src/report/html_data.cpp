#include "gradclip/report/html_data.hpp"

#include <charconv>
#include <limits>

#include "gradclip/base/error.hpp"
#include "gradclip/report/html_fields.hpp"
#include "gradclip/report/html_readers.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {

using namespace page_fields;

namespace {

PageDump read_dump(const JsonField& field) {
  PageDump dump;
  dump.path = text(field.at("path"));
  dump.step = optional_integer(field, "step");
  dump.world_size = static_cast<std::uint64_t>(field.at("world_size").integer(0, kMostRanks));
  dump.parameters = count(field.at("parameters"));
  dump.elements = count(field.at("elements"));
  dump.bytes = count(field.at("bytes"));
  return dump;
}

std::optional<double> number_of(const std::string& text) {
  double number = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

void read_run(const JsonField& root, PageReport& report) {
  constexpr std::string_view kBytes = "_bytes", kSeconds = "seconds.";
  read_facts(root, "run", report.run);
  for (auto& [key, value] : report.run) {
    const std::optional<double> number = number_of(value);
    if (number && key.ends_with(kBytes)) {
      key.resize(key.size() - kBytes.size());
      value = human_bytes(*number);
    } else if (number && key.starts_with(kSeconds)) {
      key = "time, " + key.substr(kSeconds.size());
      value = human_seconds(*number);
    }
    key = spaced(key);
  }
}

void read_checked(const JsonField& root, PageReport& report) {
  if (!root.find("checked")) return;
  const JsonField checked = root.at("checked"), checksums = root.at("checksums");
  const bool manifest = checked.at("manifest").boolean();
  const auto complete = checked.find("complete");  // reports of earlier versions have none
  const DifferingChecksums differ = differing_checksums(report.findings);
  report.checked.emplace_back("Manifest", !manifest                            ? "cannot be used"
                                          : complete && !complete->boolean()   ? "in part left out"
                                          : differ.manifest                    ? "differs from its checksum"
                                          : checksums.at("manifest").boolean() ? "as its checksum says"
                                                                               : "has no checksum");
  if (!manifest) return;
  const std::uint64_t files = count(checked.at("files")), shards = count(checked.at("shards"));
  const auto of = [](std::uint64_t some, std::uint64_t all) { return grouped(some) + " of " + grouped(all); };
  report.checked.emplace_back("Rank files read", of(files, report.dump.world_size));
  report.checked.emplace_back("Gradients in them", grouped(shards));
  report.checked.emplace_back("Files with a checksum", of(count(checksums.at("files")), report.dump.world_size));
  if (checksums.find("files_compared")) {  // reports of earlier versions have none
    report.checked.emplace_back("Files compared with it", grouped(count(checksums.at("files_compared"))));
  }
  report.checked.emplace_back("Files that differ", grouped(differ.files));
  report.checked.emplace_back("Gradients with a checksum", of(count(checksums.at("shards")), shards));
  report.checked.emplace_back("Gradients that differ", grouped(differ.gradients));
}

}  // namespace

PageReport read_page_report(std::string_view json_report, const std::string& where) {
  const JsonDocument document = parse_json(json_report, where);
  const JsonField root(document.root, where, "");
  if (const JsonField format = root.at("format"); format.string() != "gradclip.report") {
    format.fail("is " + quoted(format.string()), "'gradclip.report'", "--report FILE.json of any command writes one");
  }
  const JsonField version = root.at("version");
  if (version.integer(1, std::numeric_limits<std::int64_t>::max()) != kReportVersion) {
    version.fail("is " + version.value().dump(), std::to_string(kReportVersion),
                 "read it with the gradclip that wrote it");
  }
  PageReport report;
  report.command = text(root.at("command"));
  read_sweep(root, report);
  // A sweep is about several, the facts of a machine about none.
  if (report.command == "doctor" || report.command == "synth") {
    root.at("command").fail("reports of " + report.command + " have no page", "a report of any other command");
  }
  if (report.steps.empty()) report.dump = read_dump(root.at("dump"));
  read_run(root, report);
  if (const std::optional<JsonField> other = root.find("other")) {
    report.other = read_dump(*other);
    read_diff(root, report);
  } else {
    read_measured(root, report);
  }
  if (report.command == "merge") read_merged(root, report);
  if (report.command == "tokens") read_tokens(root, report);
  if (report.command == "accumulate") read_accumulated(root, report);
  each(root, "findings", [&](const JsonField& field) { report.findings.push_back(read_finding(field)); });
  read_checked(root, report);
  if (const std::optional<JsonField> training = root.find("training")) {
    for (const char* key : {"state", "producer"}) report.contents.emplace_back(key, text(root, key));
    add_facts(*training, "training.", report.contents);
  }
  if (const std::optional<JsonField> labels = root.find("labels")) add_facts(*labels, "", report.contents);
  read_check(root, report);
  return report;
}

}  // namespace gradclip
