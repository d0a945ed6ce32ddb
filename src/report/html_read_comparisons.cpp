#include "gradclip/report/html_readers.hpp"

#include <fmt/format.h>

#include "gradclip/report/html_fields.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {

using namespace page_fields;

namespace {

std::optional<double> extreme(const JsonField& field, const char* key, std::string* index) {
  const std::optional<JsonField> found = field.find(key);
  if (!found) return std::nullopt;
  if (index != nullptr) *index = index_or_nothing(*found, "index");
  return found->at("value").number();
}

PageDifference read_difference(const JsonField& field) {
  PageDifference parameter;
  parameter.name = text(field.at("name"));
  parameter.name_in_other = text(field, "name_in_other");
  parameter.status = text(field.at("status"));
  parameter.shape = shape_text(field);
  parameter.dtype = text(field, "dtype");
  const std::string other = text(field, "dtype_in_other");
  if (parameter.dtype.empty()) {
    parameter.dtype = other;
  } else if (!other.empty() && other != parameter.dtype) {
    parameter.dtype += " / " + other;
  }
  parameter.elements = optional_count(field, "elements");
  parameter.different = optional_count(field, "different").value_or(0);
  parameter.nan_different = optional_count(field, "nan_different").value_or(0);
  parameter.max_abs = extreme(field, "max_abs", &parameter.max_abs_index);
  parameter.max_rel = extreme(field, "max_rel", nullptr);
  parameter.relative_l2 = optional_number(field, "relative_l2");
  parameter.relative_l2_epsilons = optional_number(field, "relative_l2_epsilons");
  parameter.cosine = optional_number(field, "cosine");
  parameter.norm_ratio = optional_number(field, "norm_ratio");
  parameter.first_different = index_or_nothing(field, "first_different");
  return parameter;
}

std::string rule_text(const JsonField& rule) {
  const std::string nan = flag(rule, "equal_nan", false) ? " A NaN equals a NaN." : " A NaN equals nothing.";
  if (const std::optional<std::uint64_t> ulps = optional_count(rule, "ulp")) {
    return fmt::format("Equal when at most {} numbers of the narrower type apart.{}", grouped(*ulps), nan);
  }
  const std::optional<double> relative = optional_number(rule, "rtol");
  return fmt::format("Equal when |a − b| ≤ {} + {} × |b|.{}", optional_number(rule, "atol").value_or(0.0),
                     relative ? fmt::format("{}", *relative) : "the epsilon of the narrower type", nan);
}

PageItem read_item(const JsonField& field) {
  return {text(field, "parameter"),         optional_scalar(field, "item"), optional_scalar(field, "status"),
          value_text(field, "expected"),    value_text(field, "found"),     optional_number(field, "deviation"),
          optional_number(field, "allowed")};
}

}  // namespace

void read_diff(const JsonField& root, PageReport& report) {
  report.rule = rule_text(root.at("rule"));
  if (const std::optional<JsonField> first = root.find("first_difference")) {
    report.first_difference = text(first->at("name"));
    report.first_index = index_or_nothing(*first, "index");
  }
  each(root, "notes", [&](const JsonField& field) {
    const auto side = [&](const char* key) {
      const std::string value = optional_scalar(field, key);
      return value.empty() ? std::string("not recorded") : value;
    };
    report.contents.emplace_back(text(field.at("what")), side("a") + " in A, " + side("b") + " in B");
  });
  each(root, "parameters", [&](const JsonField& field) {
    each(field, "worst", [&](const JsonField& element) {
      report.worst.push_back({report.differences.size(), index_or_nothing(element, "index"), element.at("a").number(),
                              element.at("b").number()});
    });
    report.differences.push_back(read_difference(field));
  });
}

void read_check(const JsonField& root, PageReport& report) {
  each(root, "items", [&](const JsonField& field) { report.items.push_back(read_item(field)); });
  report.verdict = text(root, "outcome");
  report.summary = text(root, "summary");
  if (root.find("baseline_path")) report.baseline.emplace_back("baseline", text(root, "baseline_path"));
  read_facts(root, "baseline", report.baseline);
  each(root, "known_findings", [&](const JsonField& field) {
    report.known.push_back({text(field.at("kind")), text(field, "parameter"), flag(field, "seen", true)});
  });
  each(root, "changes", [&](const JsonField& field) { report.changes.push_back(read_finding(field)); });
}

}  // namespace gradclip
