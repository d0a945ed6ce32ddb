#pragma once
// Reports for people: summaries and tables. Names from a dump are printed through printable() only.

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>

#include "gradclip/report/report.hpp"

namespace gradclip {

/// What the reader's screen can show.
struct TextStyle {
  bool colour = false;
  std::size_t width = 0;  ///< columns; 0: lines may be of any length
  bool unicode = false;   ///< whether block characters may be drawn with
};

enum class ParameterOrder : std::uint8_t { model, norm, max, nan, name };

struct TableOptions {
  ParameterOrder order =
      ParameterOrder::model;  ///< numbers descending (NaN first), names ascending, ties in model order
  std::size_t top = 0;        ///< rows; 0: all
  ViewBy by = ViewBy::parameter;
  std::optional<std::size_t> depth = std::nullopt;  ///< by module: levels from the root; empty: all
};

/// The summary of `clip`: the total, what the ranks saw and the step recorded, the coefficient, the total after, the
/// scale, non-finite values, findings, where the output is, time, device and processes. About 20 lines where nothing is
/// wrong.
void write_summary(const Report& report, const TextStyle& style, std::ostream& out);

/// The table of `norms`, its rows by parameter, with the totals and findings under it.
void write_norms(const Report& report, const TableOptions& options, const TextStyle& style, std::ostream& out);

/// The answer of `inspect`.
void write_contents(const Report& report, const TextStyle& style, std::ostream& out);

/// The answer of `verify`: "clean", or the findings by kind, worst first; what was looked at and what vouches for it.
void write_verification(const Report& report, const TextStyle& style, std::ostream& out);

/// The answer of `diff`: "equal" or what differs, the parameters that differ most, findings, how it ran.
void write_differences(const Report& report, const TextStyle& style, std::ostream& out);

/// The answer of `check`: the verdict in one line, under what conditions, findings (or changes) worst first.
void write_check(const Report& report, const TextStyle& style, std::ostream& out);
/// The answer of `norms --sweep`.
void write_sweep(const Report& report, const TextStyle& style, std::ostream& out);
/// The answer of `merge`: what was written where, findings, how it ran.
void write_merged(const Report& report, const TextStyle& style, std::ostream& out);
/// The answer of `tokens`: label tokens in all and by rank, padding, findings, how it ran.
void write_tokens(const Report& report, const TextStyle& style, std::ostream& out);
/// `accumulate`.
void write_accumulated(const Report& report, const TextStyle& style, std::ostream& out);

void write_facts(const FactSheet& sheet, const TextStyle& style, std::ostream& out);

// ---------------------------------------------------------------------------------------------------------------------
// Pieces, also for progress lines
// ---------------------------------------------------------------------------------------------------------------------

/// "1.23 GB": decimal units, three digits.
[[nodiscard]] std::string human_bytes(double bytes);
/// "0.05 ms", "0.13 s", "2 min 5 s"
[[nodiscard]] std::string human_seconds(double seconds);
/// "1,234,567"
[[nodiscard]] std::string grouped(std::uint64_t number);
/// "0-3, 8": ascending ranks; after `runs` runs "..., 64 in all".
[[nodiscard]] std::string rank_list(std::span<const std::int32_t> ranks, std::size_t runs = 8);
/// Characters of UTF-8 text.
[[nodiscard]] std::size_t columns(std::string_view text) noexcept;
/// The text, or its beginning and end around "..." in `width` columns. Cuts between characters. @pre width >= 5
[[nodiscard]] std::string shortened(std::string_view text, std::size_t width);

}  // namespace gradclip
