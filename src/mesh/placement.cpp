#include "gradclip/mesh/placement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

using Kind = Placement::Kind;

constexpr std::string_view kKnownSpellings =
    "Shard(0), Shard(dim=0), S(0), Replicate(), R, Partial(), Partial(sum), P, P(sum), _StridedShard(dim=0, sf=2), "
    "_StridedShard(0, split_factor=2), _S(0, 2), Flat()";

constexpr std::array<std::pair<std::string_view, PartialOperation>, 5> kOperations{
    {{"sum", PartialOperation::sum},
     {"avg", PartialOperation::avg},
     {"max", PartialOperation::max},
     {"min", PartialOperation::min},
     {"product", PartialOperation::product}}};

enum class Parentheses { required, optional, absent };

struct Spelling {
  std::string_view name;
  Kind kind;
  Parentheses parentheses;
};

constexpr std::array<Spelling, 10> kSpellings{{{"Shard", Kind::shard, Parentheses::required},
                                               {"S", Kind::shard, Parentheses::required},
                                               {"Replicate", Kind::replicate, Parentheses::required},
                                               {"R", Kind::replicate, Parentheses::absent},
                                               {"Partial", Kind::partial, Parentheses::required},
                                               {"_Partial", Kind::partial, Parentheses::required},
                                               {"P", Kind::partial, Parentheses::optional},
                                               {"_StridedShard", Kind::strided_shard, Parentheses::required},
                                               {"_S", Kind::strided_shard, Parentheses::required},
                                               {"Flat", Kind::flat, Parentheses::required}}};

/// An untrusted text may be as long as a manifest; a message may not.
std::string shortened(std::string_view text) {
  constexpr std::size_t kLongest = 100;
  return text.size() <= kLongest ? quoted(text) : quoted(text.substr(0, kLongest)) + "...";
}

bool is_letter(char c) noexcept {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool is_digit(char c) noexcept {
  return c >= '0' && c <= '9';
}
bool is_space(char c) noexcept {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

class Parser {
 public:
  Parser(std::string_view text, std::size_t tensor_dimensions) : text_(text), tensor_dimensions_(tensor_dimensions) {}

  Placement parse() {
    const char bracket = peek();
    const bool in_brackets = bracket == '(' || bracket == '[';
    if (in_brackets) ++position_;
    const Placement placement = parse_placement();
    if (in_brackets) {
      take(',');
      require(bracket == '(' ? ')' : ']');
    }
    if (peek() != '\0' || position_ < text_.size()) fail("nothing more" + after());
    return placement;
  }

 private:
  Placement parse_placement() {
    constexpr std::string_view kModule = "torch.distributed.tensor.placement_types.";
    peek();
    if (text_.substr(position_, kModule.size()) == kModule) position_ += kModule.size();
    const std::string_view name = word();
    if (name.empty()) fail("the name of a placement" + after());
    const auto* const spelling =
        std::find_if(kSpellings.begin(), kSpellings.end(), [&](const Spelling& known) { return known.name == name; });
    if (spelling == kSpellings.end()) refuse_name(name);

    Placement placement{.kind = spelling->kind};
    if (spelling->parentheses == Parentheses::absent) return placement;
    if (spelling->parentheses == Parentheses::optional && peek() != '(') return placement;
    require('(');
    switch (placement.kind) {
      case Kind::shard:
        parse_shard(placement, false);
        break;
      case Kind::strided_shard:
        parse_shard(placement, true);
        break;
      case Kind::partial:
        parse_operation(placement);
        break;
      case Kind::replicate:
      case Kind::flat:
        break;
    }
    require(')');
    return placement;
  }

  /// Positional arguments first, then keywords in any order, as in Python.
  void parse_shard(Placement& placement, bool is_strided) {
    std::optional<std::int64_t> dim;
    std::optional<std::int64_t> split_factor;
    bool had_keyword = false;
    do {
      const std::size_t begin = (peek(), position_);
      const std::string_view keyword = word();
      if (keyword.empty() && had_keyword) fail("a keyword" + after());
      bool is_dim = !dim.has_value();
      if (!keyword.empty()) {
        had_keyword = true;
        is_dim = keyword == "dim";
        const bool is_factor = is_strided && (keyword == "sf" || keyword == "split_factor");
        if ((!is_dim && !is_factor) || (is_dim ? dim : split_factor).has_value()) {
          position_ = begin;
          fail(is_strided ? "'dim' and 'sf', once each," + after() : "'dim'" + after());
        }
        require('=');
      }
      (is_dim ? dim : split_factor) = is_dim ? dimension() : factor();
    } while (is_strided && !(dim && split_factor) && take(','));
    if (is_strided && dim && !split_factor) fail("',' and the split factor" + after());
    if (!dim) fail("',' and the dimension" + after());
    placement.dim = *dim;
    if (is_strided) placement.split_factor = *split_factor;
  }

  void parse_operation(Placement& placement) {
    if (peek() == ')') return;
    const std::size_t begin = position_;
    if (word() == "reduce_op") {
      require('=');
    } else {
      position_ = begin;
    }
    const char quote = peek();
    const bool in_quotes = quote == '\'' || quote == '"';
    if (in_quotes) ++position_;
    const std::size_t at = (peek(), position_);
    const std::string_view operation = word();
    const auto* const known = std::find_if(kOperations.begin(), kOperations.end(),
                                           [&](const auto& entry) { return entry.first == operation; });
    if (known == kOperations.end()) {
      position_ = at;
      fail("sum, avg, max, min or product" + after());
    }
    placement.operation = known->second;
    if (in_quotes) require(quote);
  }

  std::int64_t dimension() {
    const std::size_t begin = (peek(), position_);
    const std::int64_t written = integer("a tensor dimension");
    const auto dimensions = static_cast<std::int64_t>(tensor_dimensions_);
    if (written < -dimensions || written >= dimensions) {
      position_ = begin;
      fail(dimensions == 0 ? std::string("no shard of a tensor without dimensions")
                           : fmt::format("a dimension from {} to {} of a {}-dimensional tensor", -dimensions,
                                         dimensions - 1, dimensions));
    }
    return written < 0 ? written + dimensions : written;
  }

  std::int64_t factor() {
    const std::size_t begin = (peek(), position_);
    const std::int64_t written = integer("a split factor");
    if (written < 1) {
      position_ = begin;
      fail("a split factor of at least 1");
    }
    return written;
  }

  std::int64_t integer(const char* meaning) {
    peek();
    std::size_t end = position_;
    if (end < text_.size() && text_[end] == '-') ++end;
    while (end < text_.size() && is_digit(text_[end])) ++end;
    std::int64_t value = 0;
    const auto result = std::from_chars(text_.data() + position_, text_.data() + end, value);
    if (result.ec != std::errc() || result.ptr != text_.data() + end) fail(meaning + after());
    position_ = end;
    return value;
  }

  /// Empty if no name is there.
  std::string_view word() {
    peek();
    const std::size_t begin = position_;
    if (begin == text_.size() || !is_letter(text_[begin])) return {};
    while (position_ < text_.size() && (is_letter(text_[position_]) || is_digit(text_[position_]))) ++position_;
    return text_.substr(begin, position_ - begin);
  }

  /// The next character that is not white space; '\0' at the end.
  char peek() {
    while (position_ < text_.size() && is_space(text_[position_])) ++position_;
    return position_ < text_.size() ? text_[position_] : '\0';
  }

  bool take(char c) {
    if (peek() != c || position_ == text_.size()) return false;
    ++position_;
    return true;
  }

  void require(char c) {
    if (!take(c)) fail(fmt::format("'{}'", c) + after());
  }

  std::string after() const {
    std::string_view read = text_.substr(0, position_);
    while (!read.empty() && is_space(read.back())) read.remove_suffix(1);
    return read.empty() ? " at the start" : " after " + shortened(read);
  }

  [[noreturn]] void fail(std::string expected) const {
    std::string found = fmt::format("ends at column {}", position_ + 1);
    if (position_ < text_.size()) {
      found = fmt::format("{} at column {}", shortened(text_.substr(position_)), position_ + 1);
    }
    refuse(std::move(found), std::move(expected));
  }

  [[noreturn]] void refuse_name(std::string_view name) const {
    std::string found = fmt::format("no placement named {} is known", shortened(name));
    if (name == "_MaskPartial" || name == "MaskPartial" || name == "MaskP") {
      found = fmt::format("{} stands on outputs of a sharded embedding, never on a gradient", name);
    } else if (name == "_NormPartial" || name == "NormPartial") {
      found = fmt::format("{} stands on norms, never on a gradient", name);
    }
    refuse(std::move(found), "Shard, Replicate, Partial, _StridedShard or Flat");
  }

  [[noreturn]] void refuse(std::string found, std::string expected) const {
    throw Error(ExitCode::bad_input, {.where = "placement " + shortened(text_),
                                      .found = std::move(found),
                                      .expected = std::move(expected),
                                      .advice = fmt::format("known spellings are {}", kKnownSpellings)});
  }

  std::string_view text_;
  std::size_t tensor_dimensions_;
  std::size_t position_ = 0;
};

}  // namespace

Placement parse_placement(std::string_view text, std::size_t tensor_dimensions) {
  return Parser(text, tensor_dimensions).parse();
}

std::string to_string(const Placement& placement) {
  switch (placement.kind) {
    case Kind::shard:
      return fmt::format("Shard({})", placement.dim);
    case Kind::strided_shard:
      return fmt::format("_StridedShard(dim={}, sf={})", placement.dim, placement.split_factor);
    case Kind::replicate:
      return "Replicate()";
    case Kind::partial:
      return fmt::format("Partial({})", name(placement.operation));
    case Kind::flat:
      return "Flat()";
  }
  return {};
}

std::string to_string(const std::vector<Placement>& placements) {
  std::string result = "[";
  for (const Placement& placement : placements) {
    if (result.size() > 1) result += ", ";
    result += to_string(placement);
  }
  return result + "]";
}

std::string_view name(PartialOperation operation) noexcept {
  for (const auto& [text, known] : kOperations) {
    if (known == operation) return text;
  }
  return {};
}

}  // namespace gradclip
