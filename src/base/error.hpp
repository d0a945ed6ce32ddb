#pragma once
// The one exception of the project. Rooms throw it; only main turns it into a message and an exit code.

#include <exception>
#include <source_location>
#include <string>
#include <string_view>

namespace gradclip {

/// Exit codes of the program (docs/exit-codes.md).
enum class ExitCode : int {
  done = 0,
  findings = 1,   ///< the answer is "differs", "regressed" or "findings"
  usage = 2,      ///< the command line or an environment variable
  bad_input = 3,  ///< the dump or another input file
  nonfinite = 4,  ///< a non-finite total was refused (--nonfinite error)
  resources = 5,  ///< no space, no memory, no such device, no permission
  bug = 70,       ///< a broken promise inside gradclip
};

/// Which of two codes stands for a run where several processes failed: 70 before 5 before 3 before 4 before the rest.
[[nodiscard]] ExitCode graver(ExitCode a, ExitCode b) noexcept;

/// The four parts of a message; empty ones are left out.
struct ErrorText {
  std::string where = {};     ///< file, dataset, parameter, rank
  std::string found = {};     ///< what is there
  std::string expected = {};  ///< what should be there
  std::string advice = {};    ///< what to do
  /// The kind of finding that `verify` makes of bad input (docs/reports.md); empty: "unreadable". Not in the message.
  std::string_view kind = {};
};

/// @invariant what() is "where: found; expected ...; advice" and contains no control characters.
class Error : public std::exception {
 public:
  Error(ExitCode code, ErrorText text, std::source_location location = std::source_location::current());

  [[nodiscard]] ExitCode code() const noexcept { return code_; }
  [[nodiscard]] const char* what() const noexcept override { return message_.c_str(); }
  [[nodiscard]] const ErrorText& text() const noexcept { return text_; }
  /// Where in gradclip it was thrown; printed for ExitCode::bug only.
  [[nodiscard]] const std::source_location& location() const noexcept { return location_; }

 private:
  ExitCode code_;
  ErrorText text_;
  std::string message_;
  std::source_location location_;
};

/// A name from a dump as it may be printed: in single quotes, control characters and invalid UTF-8 as \xNN, quotes and
/// backslashes after a backslash, so that no name can write to the terminal or break a line.
[[nodiscard]] std::string quoted(std::string_view untrusted);
/// Beats std::quoted, which argument-dependent look-up would find for a std::string.
[[nodiscard]] inline std::string quoted(const std::string& untrusted) {
  return quoted(std::string_view(untrusted));
}
[[nodiscard]] inline std::string quoted(std::string& untrusted) {
  return quoted(std::string_view(untrusted));
}
[[nodiscard]] inline std::string quoted(const char* untrusted) {
  return quoted(std::string_view(untrusted));
}

/// The same without the quotes, for tables.
[[nodiscard]] std::string printable(std::string_view untrusted);

/// Whether every byte belongs to a well-formed UTF-8 sequence (no surrogates, no overlong forms).
[[nodiscard]] bool is_valid_utf8(std::string_view text) noexcept;

/// A promise between our own functions; broken, it is exit code 70.
#define GRADCLIP_CHECK(condition, what_is_wrong)                                                                  \
  do {                                                                                                            \
    if (!(condition)) {                                                                                           \
      throw ::gradclip::Error(::gradclip::ExitCode::bug, {.where = "internal check '" #condition "'",             \
                                                          .found = (what_is_wrong),                               \
                                                          .expected = {},                                         \
                                                          .advice = "please report this with the command line"}); \
    }                                                                                                             \
  } while (false)

}  // namespace gradclip
