#include <fmt/format.h>
#include <fmt/ranges.h>

#include "gradclip/report/structured_pieces.hpp"

namespace gradclip {

using Layout = JsonWriter::Layout;

void write_histogram(JsonWriter& json, const ExponentHistogram& histogram) {
  json.open_member("histogram", '{', Layout::one_line);
  json.open_member("exponents", '{', Layout::one_line);
  json.member("first", histogram.counts.empty() ? std::nullopt : std::optional<int>(histogram.first));
  json.member("counts", histogram.counts);
  json.close();
  json.member("zeros", histogram.zeros);
  json.member("nan", histogram.nan);
  json.member("posinf", histogram.posinf);
  json.member("neginf", histogram.neginf);
  json.open_member("casts", '{', Layout::one_line);
  for (std::size_t i = 0; i < kCastTypes.size(); ++i) {
    json.open_member(name(kCastTypes[i]), '{', Layout::one_line);
    json.member("underflow_to_zero", histogram.casts[i].to_zero);
    json.member("subnormal", histogram.casts[i].to_subnormal);
    json.member("overflow", histogram.casts[i].overflow);
    json.close();
  }
  json.close();
  json.close();
}

std::string histogram_csv_header() {
  std::string header = ",exponents_first,exponents_counts";
  for (const DType cast : kCastTypes)
    header += fmt::format(",{0}_underflow_to_zero,{0}_subnormal,{0}_overflow", name(cast));
  return header;
}

std::string histogram_csv(const ExponentHistogram& histogram) {
  std::string cells = fmt::format(",{},{}", histogram.counts.empty() ? std::string() : fmt::to_string(histogram.first),
                                  fmt::join(histogram.counts, " "));
  for (const CastCounts& cast : histogram.casts) {
    cells += fmt::format(",{},{},{}", cast.to_zero, cast.to_subnormal, cast.overflow);
  }
  return cells;
}

}  // namespace gradclip
