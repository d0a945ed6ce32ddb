#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"

namespace gradclip {
namespace {

using nlohmann::json;

std::string describe(const json& value) {
  switch (value.type()) {
    case json::value_t::null:
      return "null";
    case json::value_t::boolean:
      return value.get<bool>() ? "true" : "false";
    case json::value_t::string: {
      const auto& text = value.get_ref<const std::string&>();
      return "the string " + quoted(text.substr(0, 200)) + (text.size() > 200 ? "..." : "");
    }
    case json::value_t::object:
      return fmt::format("an object of {} members", value.size());
    case json::value_t::array:
      return fmt::format("a list of {} elements", value.size());
    default:
      return "the number " + value.dump();
  }
}

}  // namespace

std::string JsonField::path() const {
  const std::string before = parent_ == nullptr ? std::string() : parent_->path();
  if (index_) return fmt::format("{}[{}]", before, *index_);
  if (before.empty() || path_.empty()) return before + printable(path_);
  return before + "." + printable(path_);
}

std::string JsonField::where() const {
  const std::string within = path();
  return within.empty() ? *file_ : *file_ + ", " + within;
}

void JsonField::fail(const std::string& found, const std::string& expected, const std::string& advice) const {
  throw Error(ExitCode::bad_input, {.where = where(), .found = found, .expected = expected, .advice = advice});
}

void JsonField::fail(const std::string& expected) const {
  fail("is " + describe(*value_), expected);
}

JsonField JsonField::at(const char* key) const {
  const auto found = object().find(key);
  if (found == value_->end()) fail(fmt::format("has no key '{}'", key), fmt::format("'{}'", key));
  return {*found, *this, std::string(key)};
}

std::optional<JsonField> JsonField::find(const char* key) const {
  const auto found = object().find(key);
  if (found == value_->end() || found->is_null()) return std::nullopt;
  return JsonField(*found, *this, std::string(key));
}

JsonField JsonField::member(const std::string& key, const json& value) const {
  return {value, *this, key};
}

JsonField JsonField::element(std::size_t index) const {
  return {(*value_)[index], *this, index};
}

const json& JsonField::object() const {
  if (!value_->is_object()) fail("an object");
  return *value_;
}

const json& JsonField::array() const {
  if (!value_->is_array()) fail("a list");
  return *value_;
}

const std::string& JsonField::string() const {
  if (!value_->is_string()) fail("a string");
  return value_->get_ref<const std::string&>();
}

const std::string& JsonField::name() const {
  const std::string& text = string();
  if (text.empty()) fail("a name that is not empty");
  if (text.size() > kMaxNameBytes) {
    fail(fmt::format("is a name of {} bytes", text.size()), fmt::format("at most {}", kMaxNameBytes));
  }
  if (text.find('\0') != std::string::npos) fail("a name without NUL characters");
  return text;
}

bool JsonField::boolean() const {
  if (!value_->is_boolean()) fail("true or false");
  return value_->get<bool>();
}

std::int64_t JsonField::integer(std::int64_t low, std::int64_t high) const {
  std::optional<std::int64_t> integer;
  if (value_->is_number_unsigned()) {
    const auto wide = value_->get<std::uint64_t>();
    if (wide <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      integer = static_cast<std::int64_t>(wide);
    }
  } else if (value_->is_number_integer()) {
    integer = value_->get<std::int64_t>();
  } else if (value_->is_number_float()) {
    const auto number = value_->get<double>();
    if (std::abs(number) <= 9007199254740992.0 && number == std::floor(number)) {
      integer = static_cast<std::int64_t>(number);
    }
  }
  if (!integer || *integer < low || *integer > high) {
    constexpr auto kLowest = std::numeric_limits<std::int64_t>::min();
    constexpr auto kHighest = std::numeric_limits<std::int64_t>::max();
    if (low == kLowest && high == kHighest) fail("an integer");
    if (high == kHighest) fail(fmt::format("an integer >= {}", low));
    fail(fmt::format("an integer from {} to {}", low, high));
  }
  return *integer;
}

double JsonField::number() const {
  if (value_->is_number()) return value_->get<double>();
  if (value_->is_string()) {
    const std::string& word = value_->get_ref<const std::string&>();
    if (word == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (word == "inf") return std::numeric_limits<double>::infinity();
    if (word == "-inf") return -std::numeric_limits<double>::infinity();
  }
  fail("a number, or one of \"nan\", \"inf\", \"-inf\"");
}

}  // namespace gradclip
