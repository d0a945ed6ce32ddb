#include "gradclip/report/html_fields.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip::page_fields {

std::uint64_t count(const JsonField& field) {
  if (field.value().is_number_unsigned()) return field.value().get<std::uint64_t>();
  return static_cast<std::uint64_t>(field.integer(0, std::numeric_limits<std::int64_t>::max()));
}

std::optional<std::uint64_t> optional_count(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  return field ? std::optional(count(*field)) : std::nullopt;
}

std::optional<std::int64_t> optional_integer(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  if (!field) return std::nullopt;
  return field->integer(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
}

std::optional<double> optional_number(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  return field ? std::optional(field->number()) : std::nullopt;
}

std::string text(const JsonField& field) {
  return printable(field.string());
}

std::string text(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  return field ? text(*field) : std::string();
}

bool flag(const JsonField& object, const char* key, bool without) {
  const std::optional<JsonField> field = object.find(key);
  return field ? field->boolean() : without;
}

std::vector<std::int64_t> integers(const JsonField& object, const char* key) {
  std::vector<std::int64_t> result;
  each(object, key, [&](const JsonField& field) {
    result.push_back(field.integer(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()));
  });
  return result;
}

std::vector<std::int32_t> ranks(const JsonField& object, const char* key) {
  std::vector<std::int32_t> result;
  each(object, key,
       [&](const JsonField& field) { result.push_back(static_cast<std::int32_t>(field.integer(0, kMostRanks - 1))); });
  return result;
}

std::vector<std::string> texts(const JsonField& object, const char* key) {
  std::vector<std::string> result;
  each(object, key, [&](const JsonField& field) { result.push_back(text(field)); });
  return result;
}

std::string index_or_nothing(const JsonField& object, const char* key) {
  return object.find(key) ? index_text(integers(object, key)) : std::string();
}

std::string shape_text(const JsonField& object) {
  const std::vector<std::int64_t> shape = integers(object, "shape");
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, " × "));
}

std::string scalar_text(const JsonField& field) {
  if (field.value().is_string()) return text(field);
  if (field.value().is_structured()) field.fail("text, a number, true, false or null");
  return field.value().dump();
}

std::string optional_scalar(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  return field ? scalar_text(*field) : std::string();
}

std::string value_text(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  if (!field) return {};
  return field->value().is_string() ? text(*field) : printable(field->value().dump());
}

std::string spaced(std::string key) {
  std::replace(key.begin(), key.end(), '_', ' ');
  return key;
}

void add_facts(const JsonField& object, const std::string& before, std::vector<PageFact>& facts) {
  for (const auto& [key, value] : object.object().items()) {
    if (value.is_null() || value.is_array()) continue;
    const JsonField field = object.member(key, value);
    if (value.is_object()) {
      if (before.empty()) add_facts(field, key + ".", facts);
      continue;
    }
    std::string fact = scalar_text(field);
    if (!fact.empty()) facts.emplace_back(printable(before + key), std::move(fact));
  }
}

void read_facts(const JsonField& root, const char* key, std::vector<PageFact>& facts) {
  if (const std::optional<JsonField> field = root.find(key)) add_facts(*field, "", facts);
}

Finding read_finding(const JsonField& field) {
  Finding finding;
  finding.kind = text(field.at("kind"));
  finding.parameter = text(field, "parameter");
  finding.ranks = ranks(field, "ranks");
  if (field.find("index")) finding.index = integers(field, "index");
  finding.value = optional_number(field, "value");
  finding.message = text(field, "message");
  return finding;
}

}  // namespace gradclip::page_fields
