#pragma once
// Which name of one dump is which of the other, and which names are asked for.

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gradclip {

/// A regular expression in RE2's syntax (linear time, whatever the name): names come from untrusted dumps.
class NamePattern {
 public:
  /// Errors: Error(usage) with the expression and what is wrong with it. @param where  begins the message
  NamePattern(std::string_view expression, const std::string& where);
  ~NamePattern();
  NamePattern(NamePattern&&) noexcept;
  NamePattern& operator=(NamePattern&&) noexcept;

  /// Whether it matches anywhere in the name.
  [[nodiscard]] bool matches(std::string_view name) const;
  /// Replaces the first match by `rewrite`, in which \1 ... \9 are groups and \0 is the match. @return whether it
  /// matched
  [[nodiscard]] bool replace(std::string& name, const std::string& rewrite) const;
  /// What is wrong with a rewrite: a group that the expression does not have. Empty if nothing is.
  [[nodiscard]] std::string rewrite_error(const std::string& rewrite) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Names of the first dump as the second has them: rules `old-regex -> new`, of which the first that matches applies,
/// once.
class NameMap {
 public:
  NameMap() = default;

  /// One rule a line; empty lines and lines that begin with # are skipped. Errors: Error(usage) with file and line for
  /// a line without "->", a bad expression, a group that it does not have; for a file that cannot be read.
  [[nodiscard]] static NameMap read(const std::filesystem::path& file);
  /// @param where  the file, for messages
  [[nodiscard]] static NameMap parse(const std::string& text, const std::string& where);

  [[nodiscard]] std::string mapped(const std::string& name) const;

 private:
  struct Rule {
    NamePattern old_name;
    std::string new_name;
  };
  std::vector<Rule> rules_;
};

}  // namespace gradclip
