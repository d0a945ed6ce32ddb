#include "gradclip/analysis/name_map.hpp"

#include <fmt/format.h>
#include <re2/re2.h>

#include <sstream>

#include "gradclip/analysis/only_names.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/dump/text_file.hpp"

namespace gradclip {
namespace {

constexpr std::string_view kArrow = "->";

[[noreturn]] void refuse(const std::string& where, std::string found, std::string expected) {
  throw Error(ExitCode::usage,
              {.where = where, .found = std::move(found), .expected = std::move(expected), .advice = {}});
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const std::size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

}  // namespace

struct NamePattern::State {
  re2::RE2 expression;

  explicit State(std::string_view text) : expression(re2::StringPiece(text.data(), text.size()), re2::RE2::Quiet) {}
};

NamePattern::NamePattern(std::string_view expression, const std::string& where)
    : state_(std::make_unique<State>(expression)) {
  if (state_->expression.ok()) return;
  refuse(where, quoted(expression) + ": " + printable(state_->expression.error()), "a regular expression (RE2 syntax)");
}
NamePattern::~NamePattern() = default;
NamePattern::NamePattern(NamePattern&&) noexcept = default;
NamePattern& NamePattern::operator=(NamePattern&&) noexcept = default;

bool NamePattern::matches(std::string_view name) const {
  return re2::RE2::PartialMatch(re2::StringPiece(name.data(), name.size()), state_->expression);
}

bool NamePattern::replace(std::string& name, const std::string& rewrite) const {
  return re2::RE2::Replace(&name, state_->expression, rewrite);
}

std::string NamePattern::rewrite_error(const std::string& rewrite) const {
  std::string error;
  if (!state_->expression.CheckRewriteString(rewrite, &error) && error.empty()) error = "it is no rewrite";
  return error;
}

void refuse_unmatched_only() {
  throw Error(ExitCode::usage, {.where = "--only",
                                .found = "it matches no parameter",
                                .expected = "an expression that matches a part of a name",
                                .advice = "gradclip norms lists the names"});
}

NameMap NameMap::read(const std::filesystem::path& file) {
  const std::string where = "name map " + quoted(file.string());
  return parse(read_text_file(file, where, ExitCode::usage), where);
}

NameMap NameMap::parse(const std::string& text, const std::string& where) {
  NameMap map;
  std::istringstream lines(text);
  std::string content;
  for (std::size_t number = 1; std::getline(lines, content); ++number) {
    const std::string_view line = trimmed(content);
    if (line.empty() || line.front() == '#') continue;
    const std::string here = fmt::format("{}, line {}", where, number);
    const std::size_t arrow = line.rfind(kArrow);
    if (arrow == std::string_view::npos) refuse(here, quoted(line), "old-regex -> new");
    const std::string_view old_name = trimmed(line.substr(0, arrow));
    const std::string new_name(trimmed(line.substr(arrow + kArrow.size())));
    if (old_name.empty()) refuse(here, quoted(line), "an expression before ->");
    NamePattern pattern(old_name, here);
    if (const std::string error = pattern.rewrite_error(new_name); !error.empty()) {
      refuse(here, quoted(new_name) + ": " + printable(error), "groups that the expression has");
    }
    map.rules_.push_back({std::move(pattern), new_name});
  }
  return map;
}

std::string NameMap::mapped(const std::string& name) const {
  std::string result = name;
  for (const Rule& rule : rules_) {
    if (rule.old_name.replace(result, rule.new_name)) break;
  }
  return result;
}

}  // namespace gradclip
