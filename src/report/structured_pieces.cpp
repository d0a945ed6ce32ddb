#include "gradclip/report/structured_pieces.hpp"

#include <nlohmann/json.hpp>
#include <sstream>

namespace gradclip {

using Layout = JsonWriter::Layout;

std::string json_text(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

void write_dump(JsonWriter& json, std::string_view key, const ReportDump& dump) {
  json.open_member(key, '{', Layout::lines);
  json.member("path", dump.path);
  json.member("step", dump.step);
  json.member("world_size", dump.world_size);
  json.member("parameters", dump.parameters);
  json.member("elements", dump.elements);
  json.member("bytes", dump.bytes);
  json.close();
}

void write_microbatch(JsonWriter& json, const std::optional<MicrobatchRecord>& microbatch) {
  if (microbatch) {
    json.open_member("microbatch", '{', Layout::one_line);
    json.member("index", microbatch->index);
    json.member("count", microbatch->count);
    json.close();
  } else {
    json.member("microbatch", nullptr);
  }
}

void write_run(JsonWriter& json, const ReportRun& run) {
  json.open_member("run", '{', Layout::lines);
  json.member("processes", run.processes);
  json.member("device", run.device);
  json.member("device_detail", run.device_detail);
  json.member("device_reason", run.device_reason);
  json.member("communicator", run.communicator);
  json.member("communicator_detail", run.communicator_detail);
  json.member("communicator_reason", run.communicator_reason);
  json.member("threads", run.threads);
  json.member("numerics", run.numerics);
  json.member("memory_budget_bytes", run.memory_budget_bytes);
  json.member("memory_peak_bytes", run.memory_peak_bytes);
  json.member("device_memory_budget_bytes", run.device_memory_budget_bytes);
  json.member("device_memory_peak_bytes", run.device_memory_peak_bytes);
  json.member("offload", run.offload);
  if (run.kept_files) json.member("kept_files", *run.kept_files);
  json.member("locality", run.locality);
  json.open_member("seconds", '{', Layout::one_line);
  const auto part = [&](double ReportSeconds::*seconds) {
    return run.seconds_of_a_thread ? std::optional<double>((*run.seconds_of_a_thread).*seconds) : std::nullopt;
  };
  json.member("read", part(&ReportSeconds::read));
  json.member("compute", part(&ReportSeconds::compute));
  json.member("write", part(&ReportSeconds::write));
  json.member("total", run.seconds_total);
  json.close();
  json.open_member("communication", '{', Layout::one_line);
  json.member("collectives", run.communication.collectives);
  json.member("bytes_sent", run.communication.bytes_sent);
  json.member("bytes_received", run.communication.bytes_received);
  json.close();
  json.close();
}

namespace {

void write_finding(JsonWriter& json, const Finding& finding) {
  json.open('{', Layout::one_line);
  json.member("kind", finding.kind);
  json.member("parameter", finding.parameter.empty() ? std::nullopt : std::optional<std::string>(finding.parameter));
  json.member("ranks", finding.ranks);
  json.member("index", finding.index);
  json.member("value", finding.value);
  json.member("message", finding.message);
  json.close();
}

}  // namespace

void write_findings(JsonWriter& json, const std::vector<Finding>& findings, std::string_view key) {
  json.open_member(key, '[', Layout::lines);
  for (const Finding& finding : findings) write_finding(json, finding);
  json.close();
}

std::string csv_text(std::string_view text) {
  constexpr std::string_view kFormula = "=+-@\t\r";
  std::string cell;
  if (!text.empty() && kFormula.find(text.front()) != std::string_view::npos) cell += '\'';
  cell += text;
  if (cell.find_first_of(",\"\r\n") == std::string::npos) return cell;
  std::string quoted_cell = "\"";
  for (const char c : cell) {
    quoted_cell += c;
    if (c == '"') quoted_cell += '"';
  }
  return quoted_cell + '"';
}

std::string csv_value(const ReportValue& value) {
  if (std::holds_alternative<std::nullptr_t>(value)) return {};
  if (const auto* text = std::get_if<std::string>(&value)) return csv_text(*text);
  if (const auto* number = std::get_if<double>(&value)) return csv_number(*number);
  std::ostringstream number;
  JsonWriter(number).value(value);
  return number.str();
}

std::string csv_number(double number) {
  std::string text = json_number(number);
  std::erase(text, '"');
  return text;
}

std::string csv_number(std::optional<double> number) {
  return number ? csv_number(*number) : std::string();
}

}  // namespace gradclip
