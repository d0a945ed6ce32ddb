#include "gradclip/report/text_pieces.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <ostream>
#include <type_traits>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kLabelWidth = 13;
constexpr std::size_t kValueWidth = 22;

}  // namespace

std::string paint(const TextStyle& style, Ink ink, std::string_view text) {
  if (!style.colour || ink == Ink::plain) return std::string(text);
  constexpr std::array<std::string_view, 5> kCodes{"0", "1", "2", "33", "31;1"};
  return fmt::format("\x1b[{}m{}\x1b[0m", kCodes[static_cast<std::size_t>(ink)], text);
}

void line(std::ostream& out, const TextStyle& style, std::string_view label, std::string_view value,
          std::string_view remark, Ink ink) {
  out << paint(style, Ink::faint, fmt::format("{:<{}}", label, kLabelWidth)) << ' ';
  if (remark.empty()) {
    out << paint(style, ink, value);
  } else {
    const std::size_t taken = columns(value);
    out << paint(style, ink, value) << std::string(taken < kValueWidth ? kValueWidth - taken : 0, ' ') << "  "
        << remark;
  }
  out << '\n';
}

std::string left(std::string_view text, std::size_t width) {
  const std::size_t taken = columns(text);
  return std::string(text) + std::string(taken < width ? width - taken : 0, ' ');
}

std::string counted(std::uint64_t number, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", grouped(number), number == 1 ? one : many);
}

std::string percent(double share) {
  if (std::isnan(share)) return "nan";
  return fmt::format("{:.2f} %", 100.0 * share);
}

std::string part_text(std::uint64_t part, std::uint64_t all) {
  if (all == 0) return "-";
  const double share = static_cast<double>(part) / static_cast<double>(all);
  return part != 0 && share < 0.00005 ? "<0.01 %" : percent(share);
}

std::string value_text(const ReportValue& value) {
  if (std::holds_alternative<std::nullptr_t>(value)) return "not recorded";
  if (const auto* text = std::get_if<std::string>(&value)) return printable(*text);
  return std::visit(
      [](const auto& of) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(of)>>) return fmt::format("{}", of);
        return std::string();
      },
      value);
}

std::string index_text(const std::vector<std::int64_t>& index) {
  return fmt::format("[{}]", fmt::join(index, ", "));
}

std::string ranks_text(std::span<const std::int32_t> ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", rank_list(ranks));
}

std::string comma_separated(const std::vector<std::string>& texts) {
  std::string result;
  for (const std::string& text : texts) {
    if (text.empty()) continue;
    if (!result.empty()) result += ", ";
    result += text;
  }
  return result;
}

void write_head(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportDump& dump = report.dump;
  out << paint(style, Ink::strong, "gradclip " + report.command) << ' ' << printable(dump.path) << '\n';
  if (dump.step) out << "step " << *dump.step << ", ";
  out << counted(static_cast<std::uint64_t>(dump.world_size), "rank", "ranks") << ", "
      << counted(dump.parameters, "parameter", "parameters") << ", " << counted(dump.elements, "element", "elements")
      << ", " << human_bytes(static_cast<double>(dump.bytes)) << " of gradients\n\n";
}

}  // namespace gradclip
