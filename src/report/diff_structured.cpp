#include <fmt/format.h>

#include <cmath>

#include "gradclip/report/structured_pieces.hpp"

namespace gradclip {
namespace {

using Layout = JsonWriter::Layout;

void write_extreme(JsonWriter& json, std::string_view key, const std::optional<ReportExtreme>& extreme) {
  if (!extreme) {
    json.member(key, nullptr);
    return;
  }
  json.open_member(key, '{', Layout::one_line);
  json.member("value", extreme->value);
  json.member("index", extreme->index);
  json.close();
}

std::optional<std::string> type_name(const std::optional<DType>& dtype) {
  return dtype ? std::optional<std::string>(name(*dtype)) : std::nullopt;
}

void write_difference(JsonWriter& json, const ReportDifference& parameter) {
  const bool compared = parameter.elements.has_value();
  const auto if_compared = [&](auto number) {
    return compared ? std::optional<decltype(number)>(number) : std::nullopt;
  };
  json.open('{', Layout::one_line);
  json.member("name", parameter.name);
  if (parameter.name_in_other) json.member("name_in_other", *parameter.name_in_other);
  json.member("status", parameter.status);
  json.member("shape", parameter.shape);
  json.member("dtype", type_name(parameter.dtype));
  json.member("dtype_in_other", type_name(parameter.dtype_in_other));
  json.member("rtol", parameter.relative);
  json.member("elements", parameter.elements);
  json.member("different", if_compared(parameter.different));
  json.member("nan_different", if_compared(parameter.nan_different));
  json.member("none_different", if_compared(parameter.none_different));
  json.member("first_different", parameter.first_different);
  write_extreme(json, "max_abs", parameter.max_abs);
  write_extreme(json, "max_rel", parameter.max_rel);
  json.member("relative_l2", if_compared(parameter.relative_l2));
  json.member("relative_l2_epsilons", if_compared(parameter.relative_l2_epsilons));
  json.member("cosine", parameter.cosine);
  json.member("norm_ratio", parameter.norm_ratio);
  json.open_member("worst", '[', Layout::one_line);
  for (const ReportElement& element : parameter.worst) {
    json.open('{', Layout::one_line);
    json.member("index", element.index);
    json.member("a", element.a);
    json.member("b", element.b);
    json.close();
  }
  json.close();
  json.close();
}

std::string csv_index(const std::optional<ReportExtreme>& extreme) {
  return extreme ? fmt::format("{}", fmt::join(extreme->index, " ")) : std::string();
}

}  // namespace

void write_diff(JsonWriter& json, const ReportDiff& diff) {
  json.open_member("rule", '{', Layout::one_line);
  json.member("rtol", diff.relative);
  json.member("atol", diff.absolute);
  json.member("ulp", diff.ulps);
  json.member("equal_nan", diff.equal_nan);
  json.close();
  json.open_member("notes", '[', Layout::lines);
  for (const ReportNote& note : diff.notes) {
    json.open('{', Layout::one_line);
    json.member("what", note.what);
    json.member("a", note.a);
    json.member("b", note.b);
    json.close();
  }
  json.close();
  json.open_member("parameters", '[', Layout::lines);
  for (const ReportDifference& parameter : diff.parameters) write_difference(json, parameter);
  json.close();
  if (!diff.first) {
    json.member("first_difference", nullptr);
    return;
  }
  const ReportDifference& first = diff.parameters[*diff.first];
  json.open_member("first_difference", '{', Layout::one_line);
  json.member("name", first.name);
  json.member("status", first.status);
  json.member("index", first.first_different);
  json.close();
}

void write_diff_csv(const ReportDiff& diff, std::ostream& out) {
  out << "name,name_in_other,status,shape,dtype,dtype_in_other,elements,different,nan_different,none_different,max_abs,"
         "max_abs_index,max_rel,max_rel_index,relative_l2,relative_l2_epsilons,cosine,norm_ratio\n";
  for (const ReportDifference& parameter : diff.parameters) {
    out << fmt::format("{},{},{},{},{},{},", csv_text(parameter.name), csv_text(parameter.name_in_other.value_or("")),
                       parameter.status, csv_text(fmt::format("{}", fmt::join(parameter.shape, "x"))),
                       type_name(parameter.dtype).value_or(""), type_name(parameter.dtype_in_other).value_or(""));
    if (!parameter.elements) {
      out << ",,,,,,,,,,,\n";
      continue;
    }
    const auto value = [](const std::optional<ReportExtreme>& extreme) {
      return extreme ? csv_number(extreme->value) : std::string();
    };
    out << fmt::format("{},{},{},{},{},{},{},{},{},{},{},{}\n", *parameter.elements, parameter.different,
                       parameter.nan_different, parameter.none_different, value(parameter.max_abs),
                       csv_index(parameter.max_abs), value(parameter.max_rel), csv_index(parameter.max_rel),
                       csv_number(parameter.relative_l2), csv_number(parameter.relative_l2_epsilons),
                       csv_number(parameter.cosine), csv_number(parameter.norm_ratio));
  }
}

}  // namespace gradclip
