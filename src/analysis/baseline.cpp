#include "gradclip/analysis/baseline.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "gradclip/analysis/name_map.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/dump/text_file.hpp"

namespace gradclip {
namespace {

constexpr std::string_view kFormat = "gradclip.baseline";
constexpr std::int64_t kMostElements = std::numeric_limits<std::int64_t>::max();

// ---------------------------------------------------------------------------------------------------------------------
// Reading
// ---------------------------------------------------------------------------------------------------------------------

/// A key that is misspelled must not be a tolerance that does not apply.
void refuse_other_keys(const JsonField& field, std::initializer_list<std::string_view> keys) {
  for (const auto& [key, value] : field.object().items()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    field.member(key, value).fail("is no key of a baseline here", fmt::format("one of {}", fmt::join(keys, ", ")));
  }
}

double magnitude(const JsonField& field) {
  const double number = field.number();
  if (number < 0.0) field.fail("a number of at least 0, \"inf\" or \"nan\"");
  return number;
}

std::optional<double> tolerance(const JsonField& field, const char* key) {
  const std::optional<JsonField> member = field.find(key);
  if (!member) return std::nullopt;
  const double number = member->number();
  if (!(number >= 0.0)) member->fail("a number of at least 0, or \"inf\"");
  return number;
}

std::uint64_t count(const JsonField& field, const char* key) {
  return static_cast<std::uint64_t>(field.at(key).integer(0, kMostElements));
}

std::uint64_t count_or_none(const JsonField& field, const char* key) {
  const std::optional<JsonField> member = field.find(key);
  return member ? static_cast<std::uint64_t>(member->integer(0, kMostElements)) : 0;
}

BaselineNumbers numbers_of(const JsonField& field) {
  BaselineNumbers numbers;
  numbers.elements = count(field, "elements");
  numbers.zeros = count(field, "zeros");
  numbers.nan = count_or_none(field, "nan");
  numbers.posinf = count_or_none(field, "posinf");
  numbers.neginf = count_or_none(field, "neginf");
  numbers.norm = magnitude(field.at("norm"));
  numbers.max_abs = magnitude(field.at("max_abs"));
  return numbers;
}

std::optional<double> divisor(const JsonField& field, const char* key) {
  const JsonField member = field.at(key);
  return member.value().is_null() ? std::nullopt : std::optional<double>(magnitude(member));
}

BaselineConditions conditions_of(const JsonField& root) {
  BaselineConditions conditions;
  const JsonField norm_type = root.at("norm_type");
  conditions.norm_type = norm_type.number();
  if (!(conditions.norm_type > 0.0)) norm_type.fail("a number above 0, or \"inf\"");
  conditions.numerics = root.at("numerics").name();
  const JsonField scale = root.at("scale");
  refuse_other_keys(scale, {"label_token_divisor", "expert_divisor"});
  conditions.label_token_divisor = divisor(scale, "label_token_divisor");
  conditions.expert_divisor = divisor(scale, "expert_divisor");
  return conditions;
}

BaselineTolerance default_tolerance(const JsonField& field) {
  refuse_other_keys(field, {"rtol", "atol", "zeros_rtol"});
  const BaselineTolerance unsaid;
  return {tolerance(field, "rtol").value_or(unsaid.relative), tolerance(field, "atol").value_or(unsaid.absolute),
          tolerance(field, "zeros_rtol").value_or(unsaid.zeros)};
}

ToleranceRule rule_of(const JsonField& field) {
  refuse_other_keys(field, {"pattern", "rtol", "atol", "zeros_rtol"});
  const JsonField pattern = field.at("pattern");
  try {
    static_cast<void>(NamePattern(pattern.name(), pattern.where()));
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    throw Error(ExitCode::bad_input, error.text());  // nobody typed it
  }
  return {pattern.name(), tolerance(field, "rtol"), tolerance(field, "atol"), tolerance(field, "zeros_rtol")};
}

BaselineParameter parameter_of(const JsonField& field) {
  refuse_other_keys(
      field, {"name", "shape", "dtype", "counted", "elements", "zeros", "nan", "posinf", "neginf", "norm", "max_abs"});
  BaselineParameter parameter;
  parameter.name = field.at("name").name();
  const JsonField shape = field.at("shape");
  for (std::size_t d = 0; d < shape.array().size(); ++d) {
    parameter.shape.push_back(shape.element(d).integer(0, kMostElements));
  }
  const JsonField dtype = field.at("dtype");
  const std::optional<DType> type = parse_dtype(dtype.string());
  if (!type) dtype.fail(fmt::format("one of {}", dtype_names()));
  parameter.dtype = *type;
  if (const std::optional<JsonField> counted = field.find("counted")) parameter.counted = counted->boolean();
  parameter.numbers = numbers_of(field);
  return parameter;
}

BaselineFinding finding_of(const JsonField& field) {
  refuse_other_keys(field, {"kind", "parameter", "ranks", "value"});
  const std::optional<JsonField> parameter = field.find("parameter");
  const JsonField kind = field.at("kind");
  // Printed at the beginning of a line, where a CI system would look for its commands.
  if (kind.name().find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") != std::string::npos) {
    kind.fail("lower-case letters, digits and dashes");
  }
  BaselineFinding finding{kind.name(), parameter ? parameter->name() : std::string()};
  const JsonField ranks = field.at("ranks");
  for (std::size_t i = 0; i < ranks.array().size(); ++i) {
    const JsonField rank = ranks.element(i);
    const std::int64_t least = finding.ranks.empty() ? 0 : std::int64_t{finding.ranks.back()} + 1;
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    if (least > kMost) rank.fail("ranks, ascending");
    finding.ranks.push_back(static_cast<std::int32_t>(rank.integer(least, kMost)));
  }
  const JsonField value = field.at("value");
  if (!value.value().is_null()) finding.value = value.number();
  return finding;
}

template <class Read>
void each_of(const JsonField& list, const Read& read) {
  for (std::size_t i = 0; i < list.array().size(); ++i) read(list.element(i));
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing
// ---------------------------------------------------------------------------------------------------------------------

/// ASCII: nothing in a committed file reorders or hides what stands in it.
std::string text_of(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

std::string numbers_text(const BaselineNumbers& numbers) {
  std::string text = fmt::format(R"("elements": {}, "zeros": {}, )", numbers.elements, numbers.zeros);
  if (numbers.nan != 0) text += fmt::format(R"("nan": {}, )", numbers.nan);
  if (numbers.posinf != 0) text += fmt::format(R"("posinf": {}, )", numbers.posinf);
  if (numbers.neginf != 0) text += fmt::format(R"("neginf": {}, )", numbers.neginf);
  return text + fmt::format(R"("norm": {}, "max_abs": {})", json_number(numbers.norm), json_number(numbers.max_abs));
}

std::string or_null(const std::optional<double>& number) {
  return number ? json_number(*number) : "null";
}

std::string rule_text(const ToleranceRule& rule) {
  std::string text = fmt::format(R"({{"pattern": {})", text_of(rule.pattern));
  if (rule.relative) text += fmt::format(R"(, "rtol": {})", json_number(*rule.relative));
  if (rule.absolute) text += fmt::format(R"(, "atol": {})", json_number(*rule.absolute));
  if (rule.zeros) text += fmt::format(R"(, "zeros_rtol": {})", json_number(*rule.zeros));
  return text + '}';
}

std::string parameter_text(const BaselineParameter& parameter) {
  return fmt::format(R"({{"name": {}, "shape": [{}], "dtype": "{}", {}{}}})", text_of(parameter.name),
                     fmt::join(parameter.shape, ", "), name(parameter.dtype),
                     parameter.counted ? "" : R"("counted": false, )", numbers_text(parameter.numbers));
}

std::string finding_text(const BaselineFinding& finding) {
  return fmt::format(R"({{"kind": {}, "parameter": {}, "ranks": [{}], "value": {}}})", text_of(finding.kind),
                     finding.parameter.empty() ? "null" : text_of(finding.parameter), fmt::join(finding.ranks, ", "),
                     or_null(finding.value));
}

/// A member whose elements have a line each.
template <class Entry, class Text>
std::string lines(std::string_view key, const std::vector<Entry>& entries, const Text& text_of_entry) {
  std::string text = fmt::format("  \"{}\": [", key);
  std::string_view separator = "\n";
  for (const Entry& entry : entries) {
    text += separator;
    text += "    " + text_of_entry(entry);
    separator = ",\n";
  }
  return text + (entries.empty() ? "]" : "\n  ]");
}

}  // namespace

Baseline baseline_of(const Manifest& manifest, const NormResult& result, BaselineConditions conditions) {
  const auto numbers = [](const TensorStatistics& statistics, double norm) {
    return BaselineNumbers{statistics.elements, statistics.zeros,  statistics.nan,
                           statistics.posinf,   statistics.neginf, norm,
                           statistics.max_abs};
  };
  Baseline baseline;
  baseline.step = manifest.step;
  baseline.conditions = std::move(conditions);
  baseline.total = numbers(result.statistics, result.total);
  baseline.parameters.reserve(manifest.parameters.size());
  for (std::size_t i = 0; i < manifest.parameters.size(); ++i) {
    const ParameterEntry& entry = manifest.parameters[i];
    const ParameterNorm& measured = result.parameters[i];
    baseline.parameters.push_back(
        {entry.name, entry.shape, entry.dtype, numbers(measured.statistics, measured.norm), measured.counted});
  }
  for (const Finding& finding : result.findings) {
    baseline.findings.push_back({finding.kind, finding.parameter, finding.ranks, finding.value});
  }
  return baseline;
}

std::optional<Baseline> read_baseline(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    if (error) throw system_error(path, "open the baseline", error.value());
    return std::nullopt;
  }
  const std::string where = "baseline " + quoted(path.string());
  return parse_baseline(read_text_file(path, where, ExitCode::bad_input, kMaxJsonBytes), where);
}

Baseline parse_baseline(const std::string& text, const std::string& where) {
  const JsonDocument document = parse_json(text, where);
  const JsonField root(document.root, where, "");
  const JsonField format = root.at("format");
  if (format.string() != kFormat) format.fail(fmt::format("\"{}\"", kFormat));
  const JsonField version = root.at("version");
  if (version.integer(0, kMostElements) != kBaselineVersion) {
    version.fail(fmt::format("is version {}", version.value().dump()), fmt::format("version {}", kBaselineVersion),
                 "a newer gradclip may read it");
  }
  refuse_other_keys(root, {"format", "version", "step", "norm_type", "numerics", "scale", "tolerance", "tolerances",
                           "total", "parameters", "findings"});
  Baseline baseline;
  if (const std::optional<JsonField> step = root.find("step")) {
    baseline.step = step->integer(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
  }
  baseline.conditions = conditions_of(root);
  if (const std::optional<JsonField> own = root.find("tolerance")) baseline.tolerance = default_tolerance(*own);
  if (const std::optional<JsonField> rules = root.find("tolerances")) {
    if (rules->array().size() > kMostToleranceRules) {
      rules->fail(fmt::format("has {} rules", rules->array().size()), fmt::format("at most {}", kMostToleranceRules));
    }
    each_of(*rules, [&](const JsonField& rule) { baseline.rules.push_back(rule_of(rule)); });
  }
  const JsonField total = root.at("total");
  refuse_other_keys(total, {"elements", "zeros", "nan", "posinf", "neginf", "norm", "max_abs"});
  baseline.total = numbers_of(total);
  each_of(root.at("parameters"),
          [&](const JsonField& parameter) { baseline.parameters.push_back(parameter_of(parameter)); });
  if (const std::optional<JsonField> findings = root.find("findings")) {
    each_of(*findings, [&](const JsonField& finding) { baseline.findings.push_back(finding_of(finding)); });
  }
  return baseline;
}

std::string baseline_text(const Baseline& baseline) {
  const BaselineConditions& conditions = baseline.conditions;
  std::string text = fmt::format("{{\n  \"format\": \"{}\",\n  \"version\": {},\n", kFormat, kBaselineVersion);
  text += fmt::format("  \"step\": {},\n", baseline.step ? fmt::to_string(*baseline.step) : "null");
  text += fmt::format("  \"norm_type\": {},\n  \"numerics\": {},\n", json_number(conditions.norm_type),
                      text_of(conditions.numerics));
  text += fmt::format("  \"scale\": {{\"label_token_divisor\": {}, \"expert_divisor\": {}}},\n",
                      or_null(conditions.label_token_divisor), or_null(conditions.expert_divisor));
  text += fmt::format("  \"tolerance\": {{\"rtol\": {}, \"atol\": {}, \"zeros_rtol\": {}}},\n",
                      json_number(baseline.tolerance.relative), json_number(baseline.tolerance.absolute),
                      json_number(baseline.tolerance.zeros));
  text += lines("tolerances", baseline.rules, rule_text) + ",\n";
  text += fmt::format("  \"total\": {{{}}},\n", numbers_text(baseline.total));
  text += lines("parameters", baseline.parameters, parameter_text) + ",\n";
  return text + lines("findings", baseline.findings, finding_text) + "\n}\n";
}

}  // namespace gradclip
