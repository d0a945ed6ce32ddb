#pragma once
// What the texts for people are put together from. Inside this room.

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/report/text.hpp"

namespace gradclip {

enum class Ink : std::uint8_t { plain, strong, faint, warning, alarm };

/// The text in a colour, if the style has colours.
[[nodiscard]] std::string paint(const TextStyle& style, Ink ink, std::string_view text);

/// "label        value                  remark"
void line(std::ostream& out, const TextStyle& style, std::string_view label, std::string_view value,
          std::string_view remark = {}, Ink ink = Ink::plain);

/// The text filled up with spaces.
[[nodiscard]] std::string left(std::string_view text, std::size_t width);
/// "1 rank", "2,000 ranks"
[[nodiscard]] std::string counted(std::uint64_t number, std::string_view one, std::string_view many);
/// "12.30 %", "nan"
[[nodiscard]] std::string percent(double share);
/// The same of a part of a whole: "<0.01 %" where "0.00 %" would hide it, "-" of nothing.
[[nodiscard]] std::string part_text(std::uint64_t part, std::uint64_t all);
/// A value for people: "not recorded", "true", "0.5"; text is printable().
[[nodiscard]] std::string value_text(const ReportValue& value);
/// "[0, 3]"
[[nodiscard]] std::string index_text(const std::vector<std::int64_t>& index);
/// "rank 1", "ranks 0-3, 8"
[[nodiscard]] std::string ranks_text(std::span<const std::int32_t> ranks);
/// Empty texts are left out.
[[nodiscard]] std::string comma_separated(const std::vector<std::string>& texts);

/// Indices of all parameters in the order that is asked for; only the first `top` of it are sorted and returned.
[[nodiscard]] std::vector<std::size_t> ordered_parameters(const Report& report, const TableOptions& options);
/// One line of it before it is written. The pointers are into the report.
struct NormsRow {
  std::string label;  ///< printable
  double norm = 0.0;
  std::optional<double> share;  ///< empty: a tied weight that its first entry counts for
  const ReportStatistics* statistics = nullptr;
  const ExponentHistogram* histogram = nullptr;  ///< with --histogram; not by rank
};
[[nodiscard]] std::vector<NormsRow> norms_rows(const Report& report, const TableOptions& options);
/// The table of `norms`: the report's view, or its parameters, with the total as its last line.
void write_norms_table(const Report& report, const TableOptions& options, const TextStyle& style, std::ostream& out);

/// A chart of binary exponents for each of the table's rows and all, and what casts would do. @pre --histogram
void write_histograms(const Report& report, const TableOptions& options, const TextStyle& style, std::ostream& out);

/// The steps with their totals, and what each max_norm would have done. @pre --sweep
void write_sweep_tables(const Report& report, const TextStyle& style, std::ostream& out);

/// What the findings of `verify` say of checksums.
struct DifferingChecksums {
  bool manifest = false;
  std::uint64_t files = 0;
  std::uint64_t gradients = 0;  ///< of all ranks
};
[[nodiscard]] DifferingChecksums differing_checksums(std::span<const Finding> findings) noexcept;

/// The command, the dump and its size, with an empty line under it.
void write_head(const Report& report, const TextStyle& style, std::ostream& out);
/// How many findings, and the first of them.
void write_first_findings(const Report& report, const TextStyle& style, std::ostream& out);

}  // namespace gradclip
