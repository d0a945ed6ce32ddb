#pragma once
// JSON of the format and of reports: untrusted text to values, with the checksum that vouches for it, and values with
// the path of each for error messages.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace gradclip {

inline constexpr std::size_t kMaxJsonBytes = std::size_t{1} << 30;
inline constexpr std::size_t kMaxJsonDepth = 64;
inline constexpr std::size_t kMaxNameBytes = 4096;

/// Members of the document that are handed over one by one as they are read and not kept, so that memory does not grow
/// with a whole document tree.
struct JsonStream {
  /// The array at this key of the root whose elements are handed over; empty: the root's own members.
  std::string array;
  /// @param key    the member's key (root members only)
  /// @param index  position in the array or object
  std::function<void(const std::string& key, std::size_t index, nlohmann::json&& value)> take;
  /// Whether JsonDocument::checksum is wanted; it stays 0 without.
  bool checksum = true;
};

struct JsonDocument {
  nlohmann::json root;  ///< an object; without what was handed over
  /// XXH3-64 of the root without its member "checksum", as compact JSON with sorted keys, UTF-8 unescaped, every number
  /// in its own spelling: the bytes of Python's json.dumps(root, sort_keys=True, separators=(",", ":"),
  /// ensure_ascii=False).
  std::uint64_t checksum = 0;
};

/// Errors: Error(bad_input) beginning with `where`, for malformed text, trailing text, duplicate keys (named by path),
/// bare NaN and Infinity, numbers beyond float64, more than kMaxJsonDepth levels or kMaxJsonBytes, a root that is no
/// object.
[[nodiscard]] JsonDocument parse_json(std::string_view text, const std::string& where,
                                      const JsonStream* stream = nullptr);

/// Byte ranges of the root's members in text that parse_json() accepted, in its order.
struct JsonMember {
  std::string_view key;    ///< with its quotes, as it is spelled
  std::string_view value;  ///< without white space around it

  /// The key as it is meant, escapes resolved.
  [[nodiscard]] std::string name() const;
};
[[nodiscard]] std::vector<JsonMember> root_members(std::string_view text);

/// Text as a JSON string with quotes, escaped as Python's json.dumps(ensure_ascii=False) does.
[[nodiscard]] std::string json_string(std::string_view text);

/// A value with the way to it. Valid as long as the value and the field that it came from.
class JsonField {
 public:
  /// @param file  begins every message
  /// @param path  of this value within the document, may be empty
  JsonField(const nlohmann::json& value, const std::string& file, std::string path)
      : value_(&value), file_(&file), path_(std::move(path)) {}

  [[nodiscard]] const nlohmann::json& value() const noexcept { return *value_; }
  [[nodiscard]] std::string path() const;
  /// "FILE, PATH"
  [[nodiscard]] std::string where() const;

  /// The member. Errors: not an object; no such member.
  [[nodiscard]] JsonField at(const char* key) const;
  /// Empty if it is missing or null.
  [[nodiscard]] std::optional<JsonField> find(const char* key) const;
  [[nodiscard]] JsonField member(const std::string& key, const nlohmann::json& value) const;
  [[nodiscard]] JsonField element(std::size_t index) const;

  [[nodiscard]] const nlohmann::json& object() const;
  [[nodiscard]] const nlohmann::json& array() const;
  [[nodiscard]] const std::string& string() const;
  /// A string of at most kMaxNameBytes, not empty, without NUL.
  [[nodiscard]] const std::string& name() const;
  [[nodiscard]] bool boolean() const;
  /// An integer in [low, high]; 3.0 counts as 3.
  [[nodiscard]] std::int64_t integer(std::int64_t low, std::int64_t high) const;
  /// A number, or one of the strings "nan", "inf", "-inf".
  [[nodiscard]] double number() const;

  [[noreturn]] void fail(const std::string& found, const std::string& expected, const std::string& advice = {}) const;
  /// fail() with a short description of the value.
  [[noreturn]] void fail(const std::string& expected) const;

 private:
  JsonField(const nlohmann::json& value, const JsonField& parent, std::string step)
      : value_(&value), parent_(&parent), file_(parent.file_), path_(std::move(step)) {}
  JsonField(const nlohmann::json& value, const JsonField& parent, std::size_t index)
      : value_(&value), parent_(&parent), file_(parent.file_), index_(index) {}

  const nlohmann::json* value_;
  const JsonField* parent_ = nullptr;
  const std::string* file_;
  std::string path_;
  std::optional<std::size_t> index_;
};

}  // namespace gradclip
