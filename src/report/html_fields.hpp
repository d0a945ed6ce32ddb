#pragma once
// What all readers of a JSON report take from it: fields, which may be missing or null. Inside this room.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/dump/json_document.hpp"
#include "gradclip/report/html_data.hpp"

namespace gradclip::page_fields {

/// That a dump may have.
inline constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;

[[nodiscard]] std::uint64_t count(const JsonField& field);
[[nodiscard]] std::optional<std::uint64_t> optional_count(const JsonField& object, const char* key);
[[nodiscard]] std::optional<std::int64_t> optional_integer(const JsonField& object, const char* key);
[[nodiscard]] std::optional<double> optional_number(const JsonField& object, const char* key);
/// As it may be shown: a name with a line feed is one line everywhere, and is found by what is seen of it.
[[nodiscard]] std::string text(const JsonField& field);
[[nodiscard]] std::string text(const JsonField& object, const char* key);
[[nodiscard]] bool flag(const JsonField& object, const char* key, bool without);

template <class Take>
void each(const JsonField& object, const char* key, const Take& take) {
  const std::optional<JsonField> list = object.find(key);
  if (!list) return;
  for (std::size_t i = 0; i < list->array().size(); ++i) take(list->element(i));
}

[[nodiscard]] std::vector<std::int64_t> integers(const JsonField& object, const char* key);
[[nodiscard]] std::vector<std::int32_t> ranks(const JsonField& object, const char* key);
[[nodiscard]] std::vector<std::string> texts(const JsonField& object, const char* key);
[[nodiscard]] std::string index_or_nothing(const JsonField& object, const char* key);
/// Of its "shape": "16 × 24", "scalar"
[[nodiscard]] std::string shape_text(const JsonField& object);
/// A scalar as the report has it.
[[nodiscard]] std::string scalar_text(const JsonField& field);
[[nodiscard]] std::string optional_scalar(const JsonField& object, const char* key);
/// Any value as the report has it.
[[nodiscard]] std::string value_text(const JsonField& object, const char* key);
/// "underflow_to_zero" as words.
[[nodiscard]] std::string spaced(std::string key);

/// Scalars of an object, those of its objects with a dot.
void add_facts(const JsonField& object, const std::string& before, std::vector<PageFact>& facts);
void read_facts(const JsonField& root, const char* key, std::vector<PageFact>& facts);
[[nodiscard]] Finding read_finding(const JsonField& field);

}  // namespace gradclip::page_fields
