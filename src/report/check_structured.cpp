#include <fmt/format.h>

#include <ostream>
#include <variant>

#include "gradclip/report/structured_pieces.hpp"

namespace gradclip {
namespace {

using Layout = JsonWriter::Layout;

void write_value(JsonWriter& json, std::string_view key, const CheckValue& value) {
  json.key(key);
  std::visit(
      [&](const auto& held) {
        if constexpr (std::is_same_v<std::decay_t<decltype(held)>, std::monostate>) {
          json.value(nullptr);
        } else {
          json.value(held);
        }
      },
      value);
}

std::optional<std::string> name_of(const CheckedEntry& entry) {
  return entry.name.empty() ? std::nullopt : std::optional<std::string>(entry.name);
}

void write_item(JsonWriter& json, const CheckedEntry& entry, const CheckItem& item) {
  json.open('{', Layout::one_line);
  json.member("parameter", name_of(entry));
  json.member("item", item.what);
  json.member("status", name(item.status));
  write_value(json, "expected", item.expected);
  write_value(json, "found", item.found);
  json.member("deviation", item.deviation);
  json.member("allowed", item.allowed);
  json.close();
}

std::string csv_value(const CheckValue& value) {
  if (const double* number = std::get_if<double>(&value)) return csv_number(*number);
  return csv_text(text_of(value));
}

void write_conditions(JsonWriter& json, const CheckResult& check) {
  if (!check.recorded) {
    json.member("baseline", nullptr);
    return;
  }
  const BaselineConditions& recorded = *check.recorded;
  json.open_member("baseline", '{', Layout::lines);
  json.member("step", check.recorded_step);
  json.member("norm_type", recorded.norm_type);
  json.member("numerics", recorded.numerics);
  json.member("label_token_divisor", recorded.label_token_divisor);
  json.member("expert_divisor", recorded.expert_divisor);
  json.member("rtol", check.tolerance->relative);
  json.member("atol", check.tolerance->absolute);
  json.member("zeros_rtol", check.tolerance->zeros);
  json.member("unused_patterns", check.unused_patterns);
  json.close();
}

}  // namespace

void write_check(JsonWriter& json, const Report& report) {
  const CheckResult& check = *report.check;
  const CheckCounts counts = count_items(check);
  json.member("outcome", name(check.outcome));
  json.member("summary", check_summary(report));
  json.member("baseline_path", check.path);
  write_conditions(json, check);
  json.open_member("counts", '{', Layout::one_line);
  json.member("items_passed", counts.items_passed);
  json.member("items_failed", counts.items_failed);
  json.member("parameters_passed", counts.parameters_passed);
  json.member("parameters_failed", counts.parameters_failed);
  json.close();
  json.open_member("items", '[', Layout::lines);
  for (const CheckedEntry& entry : check.entries) {
    for (const CheckItem& item : entry.items) write_item(json, entry, item);
  }
  json.close();
  json.open_member("known_findings", '[', Layout::lines);
  for (const KnownFinding& known : check.known) {
    json.open('{', Layout::one_line);
    json.member("kind", known.finding.kind);
    json.member("parameter",
                known.finding.parameter.empty() ? std::nullopt : std::optional<std::string>(known.finding.parameter));
    json.member("seen", known.seen);
    json.close();
  }
  json.close();
  write_findings(json, check.changes, "changes");
}

void write_check_csv(const CheckResult& check, std::ostream& out) {
  out << "parameter,item,status,expected,found,deviation,allowed\n";
  for (const CheckedEntry& entry : check.entries) {
    for (const CheckItem& item : entry.items) {
      out << fmt::format("{},{},{},{},{},{},{}\n", csv_text(entry.name), item.what, name(item.status),
                         csv_value(item.expected), csv_value(item.found), csv_number(item.deviation),
                         csv_number(item.allowed));
    }
  }
}

}  // namespace gradclip
