#include "gradclip/dump/json_document.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"

namespace gradclip {
namespace {

/// Of a number with any number of digits: what a person recognises it by.
std::string beginning_of(const std::string& token) {
  constexpr std::size_t kMost = 40;
  return token.size() <= kMost ? token : token.substr(0, kMost) + "...";
}

using nlohmann::json;

void append_json_string(std::string& to, std::string_view text) {
  to += '"';
  for (const char c : text) {
    switch (c) {
      case '"':
        to += "\\\"";
        break;
      case '\\':
        to += "\\\\";
        break;
      case '\b':
        to += "\\b";
        break;
      case '\f':
        to += "\\f";
        break;
      case '\n':
        to += "\\n";
        break;
      case '\r':
        to += "\\r";
        break;
      case '\t':
        to += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          to += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
        } else {
          to += c;
        }
    }
  }
  to += '"';
}

/// Of an object.
struct Member {
  std::string key;
  std::size_t begin;  // of the canonical text
  std::size_t end = 0;
};

/// The canonical text of all open containers, as one string; nothing where it is not wanted.
class CanonicalText {
 public:
  explicit CanonicalText(bool wanted) : wanted_(wanted) {}

  [[nodiscard]] bool wanted() const noexcept { return wanted_; }
  [[nodiscard]] std::size_t size() const noexcept { return text_.size(); }
  [[nodiscard]] std::string_view of(const Member& member) const {
    return std::string_view(text_).substr(member.begin, member.end - member.begin);
  }

  void operator+=(std::string_view text) {
    if (wanted_) text_ += text;
  }
  void string(std::string_view value) {
    if (wanted_) append_json_string(text_, value);
  }
  /// An object that has begun there, with its members in their order.
  void reorder(std::size_t begin, const std::vector<Member>& members) {
    if (!wanted_) return;
    std::string sorted = "{";
    for (const Member& member : members) {
      if (sorted.size() > 1) sorted += ',';
      sorted += of(member);
    }
    text_.replace(begin, std::string::npos, sorted);
  }

 private:
  bool wanted_;
  std::string text_;
};

/// Builds values and the canonical text side by side. An object whose keys turn out not to be sorted is put in order
/// when it ends.
class Builder : public nlohmann::json_sax<json> {
 public:
  Builder(std::string_view text, const std::string& where, const JsonStream* stream)
      : text_(text), where_(where), stream_(stream), canonical_(stream == nullptr || stream->checksum) {}

  bool null() override { return scalar(nullptr, "null"); }
  bool boolean(bool value) override { return scalar(value, value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return scalar(value, std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override { return scalar(value, std::to_string(value)); }
  bool number_float(number_float_t value, const string_t& spelling) override { return scalar(value, spelling); }
  bool binary(binary_t&) override { return false; }

  bool string(string_t& value) override {
    begin_value();
    canonical_.string(value);
    place(json(std::move(value)));
    return true;
  }

  bool start_object(std::size_t) override { return open(json::value_t::object); }
  bool start_array(std::size_t) override { return open(json::value_t::array); }

  bool key(string_t& key) override {
    Frame& frame = frames_.back();
    if (!frame.members.empty()) canonical_ += ",";
    frame.members.push_back({key, canonical_.size()});
    canonical_.string(key);
    canonical_ += ":";
    frame.key = std::move(key);
    return true;
  }

  bool end_object() override {
    Frame& frame = frames_.back();
    const bool sorted = sort_members(frame);
    if (frames_.size() == 1) {
      hash_root(frame);
    } else {
      if (!sorted) canonical_.reorder(frame.begin, frame.members);
      canonical_ += "}";
    }
    return close();
  }

  bool end_array() override {
    canonical_ += "]";
    return close();
  }

  bool parse_error(std::size_t position, const std::string& last_token,
                   const nlohmann::detail::exception& error) override {
    const std::string path = current_path();
    const std::string where = path.empty() ? where_ : where_ + ", " + path;
    for (std::size_t back = 1; back <= 2; ++back) {
      if (position < back) break;
      const std::string_view rest = text_.substr(std::min(position - back, text_.size()));
      if (rest.starts_with("NaN") || rest.starts_with("Infinity") || rest.starts_with("-Infinity")) {
        throw Error(
            ExitCode::bad_input,
            {.where = where,
             .found = fmt::format("bare {}, which JSON does not have", rest[0] == 'N' ? "NaN" : "Infinity"),
             .expected = "a number, or one of the strings \"nan\", \"inf\", \"-inf\"",
             .advice = "write non-finite numbers as these strings (json.dumps(..., allow_nan=False) finds them)"});
      }
    }
    if (std::string_view(error.what()).find("out of range") != std::string_view::npos || error.id == 406) {
      throw Error(ExitCode::bad_input,
                  {.where = where,
                   .found = "the number " + quoted(beginning_of(last_token)) + " does not fit a float64",
                   .expected = {},
                   .advice = {}});
    }
    // nlohmann's text: "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ..."
    std::string_view what = error.what();
    if (const auto bracket = what.find("] "); bracket != std::string_view::npos) what.remove_prefix(bracket + 2);
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = "is not well-formed JSON: " + printable(what.substr(0, 400)),
                                      .expected = {},
                                      .advice = "the file is damaged or was edited by hand"});
  }

  JsonDocument result() && { return {std::move(root_), checksum_}; }

 private:
  struct Frame {
    json* value;
    std::size_t begin;  // of this container in canonical_
    bool handed_over;   // its members go to the stream
    std::size_t count = 0;
    std::string key;  // of the member being read
    std::vector<Member> members;
  };

  void begin_value() {
    if (frames_.empty()) return;
    Frame& frame = frames_.back();
    if (frame.value->is_array() && frame.count != 0) canonical_ += ",";
  }

  bool scalar(json value, std::string_view spelling) {
    begin_value();
    canonical_ += spelling;
    place(std::move(value));
    return true;
  }

  /// Puts a finished scalar where it belongs.
  void place(json&& value) {
    if (frames_.empty()) refuse_root();
    Frame& frame = frames_.back();
    if (frame.handed_over) {
      handed_ = std::move(value);
    } else if (frame.value->is_array()) {
      frame.value->push_back(std::move(value));
    } else {
      insert(frame) = std::move(value);
    }
    finish_member();
  }

  json& insert(Frame& frame) {
    auto& object = frame.value->get_ref<json::object_t&>();
    const auto [position, inserted] = object.try_emplace(frame.key, nullptr);
    if (!inserted) refuse_duplicate(std::string(frame.key));
    return position->second;
  }

  void finish_member() {
    Frame& frame = frames_.back();
    if (!frame.members.empty()) frame.members.back().end = canonical_.size();
    if (frame.handed_over) {
      stream_->take(frame.key, frame.count, std::move(handed_));
      handed_ = nullptr;
    }
    ++frame.count;
  }

  bool open(json::value_t type) {
    if (frames_.size() >= kMaxJsonDepth) {
      throw Error(ExitCode::bad_input, {.where = where_,
                                        .found = "is nested deeper than " + std::to_string(kMaxJsonDepth) + " levels",
                                        .expected = {},
                                        .advice = {}});
    }
    if (frames_.empty() && type != json::value_t::object) refuse_root();
    begin_value();
    json* value = &root_;
    bool handed_over = false;
    if (!frames_.empty()) {
      Frame& parent = frames_.back();
      if (parent.handed_over) {
        value = &handed_;
      } else if (parent.value->is_array()) {
        value = &parent.value->emplace_back(nullptr);
      } else {
        value = &insert(parent);
        handed_over = stream_ != nullptr && frames_.size() == 1 && !stream_->array.empty() &&
                      parent.key == stream_->array && type == json::value_t::array;
      }
    } else {
      handed_over = stream_ != nullptr && stream_->array.empty();
    }
    *value = json(type);
    frames_.push_back({value, canonical_.size(), handed_over, 0, {}, {}});
    canonical_ += type == json::value_t::array ? "[" : "{";
    return true;
  }

  bool close() {
    frames_.pop_back();
    if (!frames_.empty()) finish_member();
    return true;
  }

  /// @return whether they were sorted already
  bool sort_members(Frame& frame) {
    const auto by_key = [](const Member& a, const Member& b) { return a.key < b.key; };
    const bool sorted = std::is_sorted(frame.members.begin(), frame.members.end(), by_key);
    if (!sorted) std::sort(frame.members.begin(), frame.members.end(), by_key);
    const auto same_key = [](const Member& a, const Member& b) { return a.key == b.key; };
    const auto twin = std::adjacent_find(frame.members.begin(), frame.members.end(), same_key);
    if (twin != frame.members.end()) refuse_duplicate(std::string(twin->key));
    return sorted;
  }

  void hash_root(const Frame& frame) {
    if (!canonical_.wanted()) return;
    Checksum checksum;
    std::string_view separator = "{";
    for (const Member& member : frame.members) {
      if (member.key == "checksum") continue;
      checksum.update(separator.data(), separator.size());
      const std::string_view text = canonical_.of(member);
      checksum.update(text.data(), text.size());
      separator = ",";
    }
    if (separator == "{") checksum.update("{", 1);
    checksum.update("}", 1);
    checksum_ = checksum.digest();
  }

  [[noreturn]] void refuse_root() const {
    throw Error(ExitCode::bad_input, {.where = where_, .found = "is not a JSON object", .expected = {}, .advice = {}});
  }

  [[noreturn]] void refuse_duplicate(const std::string& key) {
    frames_.back().key.clear();
    const std::string path = current_path();
    throw Error(ExitCode::bad_input, {.where = path.empty() ? where_ : where_ + ", " + path,
                                      .found = "the key " + quoted(key) + " stands twice",
                                      .expected = "each key once",
                                      .advice = {}});
  }

  std::string current_path() const {
    std::string path;
    for (const Frame& frame : frames_) {
      if (frame.value->is_array()) {
        path += fmt::format("[{}]", frame.count);
      } else if (!frame.key.empty()) {
        path += (path.empty() ? "" : ".") + printable(frame.key);
      }
    }
    return path;
  }

  std::string_view text_;
  const std::string& where_;
  const JsonStream* stream_;
  json root_;
  json handed_;
  std::vector<Frame> frames_;
  CanonicalText canonical_;
  std::uint64_t checksum_ = 0;
};

std::string_view without_space(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  return text.substr(0, text.find_last_not_of(kSpace) + 1);
}

}  // namespace

JsonDocument parse_json(std::string_view text, const std::string& where, const JsonStream* stream) {
  if (text.size() > kMaxJsonBytes) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = fmt::format("has {} bytes", text.size()),
                                      .expected = fmt::format("at most {}", kMaxJsonBytes),
                                      .advice = {}});
  }
  Builder builder(text, where, stream);
  json::sax_parse(text.begin(), text.end(), &builder);
  return std::move(builder).result();
}

std::string json_string(std::string_view text) {
  std::string result;
  append_json_string(result, text);
  return result;
}

std::string JsonMember::name() const {
  if (key.find('\\') == std::string_view::npos) return std::string(key.substr(1, key.size() - 2));
  return nlohmann::json::parse(key).get<std::string>();
}

std::vector<JsonMember> root_members(std::string_view text) {
  std::vector<JsonMember> members;
  std::size_t depth = 0;
  bool in_string = false;
  std::size_t member = 0;
  std::size_t colon = 0;
  const auto end_member = [&](std::size_t end) {
    if (colon == 0) return;
    members.push_back(
        {without_space(text.substr(member, colon - member)), without_space(text.substr(colon + 1, end - colon - 1))});
    member = end + 1;
    colon = 0;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') {
      if (++depth == 1) member = i + 1;
    }
    if (c == ':' && depth == 1) colon = i;
    if ((c == ',' || c == '}') && depth == 1) end_member(i);
    if (c == '}' || c == ']') --depth;
  }
  return members;
}

}  // namespace gradclip
