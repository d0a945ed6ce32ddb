#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <ostream>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/report/structured_pieces.hpp"
#include "gradclip/report/text_pieces.hpp"
#include "gradclip/report/text_table.hpp"

namespace gradclip {

using Layout = JsonWriter::Layout;

namespace {

constexpr std::size_t kMostRows = 40;  // of a list that the JSON has in full

std::string types_text(const std::vector<DType>& types) {
  std::vector<std::string> names;
  for (const DType dtype : types) names.emplace_back(name(dtype));
  return comma_separated(names);
}

std::string flag_text(const std::optional<bool>& flag) {
  return flag ? (*flag ? "on" : "off") : "-";
}

std::string yes_text(const std::optional<bool>& flag) {
  return flag ? (*flag ? "yes" : "no") : "-";
}

void write_microbatches(const ReportAccumulate& accumulated, const TextStyle& style, std::ostream& out) {
  using Kind = TextTable::Kind;
  TextTable table;
  table.column("microbatch", Kind::number, 10);
  for (const char* label : {"first microbatch", "optimizer step", "synchronised", "schedule step", "ends a window"}) {
    table.column(label, Kind::text);
  }
  const std::size_t shown = std::min(accumulated.microbatches.size(), kMostRows);
  for (std::size_t k = 0; k < shown; ++k) {
    const ReportMicrobatch& one = accumulated.microbatches[k];
    const MicrobatchRecord& record = one.record;
    table.row({fmt::to_string(record.index), flag_text(record.first_microbatch), flag_text(record.optimizer_step),
               yes_text(record.synchronised), record.schedule_step ? fmt::to_string(*record.schedule_step) : "-",
               one.ends_window ? "yes" : "no"});
  }
  table.write(out, style);
  if (accumulated.microbatches.size() > shown) {
    out << fmt::format("... and {} more: --format json has all\n", grouped(accumulated.microbatches.size() - shown));
  }
  out << '\n';
}

}  // namespace

Report accumulate_report(const std::filesystem::path& dump, const Manifest& manifest, ReportAccumulate accumulated,
                         std::vector<Finding> findings, ReportRun run) {
  Report report;
  report.command = "accumulate";
  report.dump = report_dump(dump, manifest);
  report.run = std::move(run);
  report.accumulate = std::move(accumulated);
  report.findings = std::move(findings);
  return report;
}

void add_check(Report& report, Report diff) {
  report.dump = std::move(diff.dump);
  report.diff = std::move(diff.diff);
  std::move(diff.findings.begin(), diff.findings.end(), std::back_inserter(report.findings));
}

void write_accumulate(JsonWriter& json, const Report& report) {
  const ReportAccumulate& accumulated = *report.accumulate;
  json.open_member("accumulated", '{', Layout::lines);
  json.member("microbatches", grouped(accumulated.microbatches.size()));
  json.member("windows", grouped(accumulated.windows));
  json.member("parameters", grouped(report.dump.parameters));
  json.member("reduced over ranks", grouped(accumulated.reduced));
  json.member("reduce dtype", types_text(accumulated.reduce_dtypes));
  json.member("dtype", types_text(accumulated.storage_dtypes));
  json.close();
  if (accumulated.output) {
    json.open_member("output", '{', Layout::lines);
    json.member("path", *accumulated.output);
    json.member("gradients", human_bytes(static_cast<double>(accumulated.bytes)));
    json.close();
  } else {
    json.member("output", nullptr);
  }
  json.open_member("microbatches", '[', Layout::lines);
  for (const ReportMicrobatch& one : accumulated.microbatches) {
    json.open('{', Layout::one_line);
    json.member("index", one.record.index);
    json.member("first_microbatch", one.record.first_microbatch);
    json.member("optimizer_step", one.record.optimizer_step);
    json.member("synchronised", one.record.synchronised);
    json.member("schedule_step", one.record.schedule_step);
    json.member("ends_window", one.ends_window);
    json.close();
  }
  json.close();
}

void write_accumulate_csv(const ReportAccumulate& accumulated, std::ostream& out) {
  const auto flag = [](const std::optional<bool>& value) { return value ? fmt::format("{}", *value) : std::string(); };
  out << "index,first_microbatch,optimizer_step,synchronised,schedule_step,ends_window\n";
  for (const ReportMicrobatch& one : accumulated.microbatches) {
    const MicrobatchRecord& record = one.record;
    out << fmt::format("{},{},{},{},{},{}\n", record.index, flag(record.first_microbatch), flag(record.optimizer_step),
                       flag(record.synchronised), record.schedule_step ? fmt::to_string(*record.schedule_step) : "",
                       one.ends_window);
  }
}

void write_accumulated(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportAccumulate& accumulated = *report.accumulate;
  write_head(report, style, out);
  write_microbatches(accumulated, style, out);
  line(out, style, "windows", grouped(accumulated.windows),
       fmt::format("of {}", counted(accumulated.microbatches.size(), "microbatch", "microbatches")));
  line(out, style, "reduced", grouped(accumulated.reduced),
       fmt::format("of {}, over ranks, in {}", counted(report.dump.parameters, "parameter", "parameters"),
                   types_text(accumulated.reduce_dtypes)));
  if (accumulated.output) {
    line(out, style, "output", printable(*accumulated.output),
         fmt::format("{} of {}", human_bytes(static_cast<double>(accumulated.bytes)),
                     types_text(accumulated.storage_dtypes)));
  }
  if (report.diff) {
    out << '\n';
    write_differences(report, style, out);
    return;
  }
  write_first_findings(report, style, out);
  out << '\n';
  const ReportRun& run = *report.run;
  line(out, style, "device", printable(run.device), printable(run.device_detail));
  line(out, style, "time", human_seconds(run.seconds_total));
  line(out, style, "processes", fmt::format("{}, {}", run.processes, printable(run.communicator)));
}

}  // namespace gradclip
