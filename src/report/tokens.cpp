#include <fmt/format.h>

#include <algorithm>
#include <ostream>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/report/structured_pieces.hpp"
#include "gradclip/report/text_pieces.hpp"
#include "gradclip/report/text_table.hpp"

namespace gradclip {

using Layout = JsonWriter::Layout;

namespace {

constexpr std::size_t kMostRows = 20;  // of a list that the JSON has in full

void write_counts(JsonWriter& json, const LabelCounts& counts) {
  json.member("sequences", counts.sequences);
  json.member("elements", counts.elements);
  json.member("label_tokens", counts.label_tokens);
  json.member("tail_padding", counts.tail_padding);
}

void write_microbatches(const ReportTokens& tokens, const TextStyle& style, std::ostream& out) {
  const std::vector<LabelCounts>& counts = tokens.counted.by_microbatch;
  std::string each;
  for (std::size_t k = 0; k < std::min(counts.size(), kMostRows); ++k) {
    each += (k == 0 ? "" : ", ") + grouped(counts[k].label_tokens);
  }
  if (counts.size() > kMostRows) each += ", ...";
  if (!each.empty()) each += counts.size() == 1 ? " label tokens" : " label tokens in each";
  line(out, style, "microbatches", grouped(counts.size()), each);
  if (tokens.microbatch && tokens.microbatch->count != 1) {
    line(out, style, "",
         fmt::format("of microbatch {} of {} alone", tokens.microbatch->index, tokens.microbatch->count), {},
         Ink::warning);
  }
}

void write_ranks(const LabelTokens& counted, const TextStyle& style, std::ostream& out) {
  if (counted.ranks.empty()) return;
  using Kind = TextTable::Kind;
  TextTable table;
  table.column("rank", Kind::number, 8);
  table.column("coordinate", Kind::number, 12);
  for (const char* label : {"microbatches", "sequences", "elements", "label tokens", "tail padding"}) {
    table.column(label, Kind::number, 14);
  }
  table.column("", Kind::text);
  const std::size_t shown = std::min(counted.ranks.size(), kMostRows);
  for (std::size_t i = 0; i < shown; ++i) {
    const RankLabels& rank = counted.ranks[i];
    table.row({fmt::to_string(rank.rank), fmt::to_string(rank.coordinate), grouped(rank.counts.microbatches),
               grouped(rank.counts.sequences), grouped(rank.counts.elements), grouped(rank.counts.label_tokens),
               grouped(rank.counts.tail_padding), rank.counted ? "" : "a copy"},
              rank.counted ? Ink::plain : Ink::faint);
  }
  table.write(out, style);
  if (counted.ranks.size() > shown) {
    out << fmt::format("... and {} more: --format json has all\n", grouped(counted.ranks.size() - shown));
  }
  out << '\n';
}

}  // namespace

Report tokens_report(const std::filesystem::path& dump, const Manifest& manifest, LabelTokens counted, ReportRun run) {
  Report report;
  report.command = "tokens";
  report.dump = report_dump(dump, manifest);
  report.run = std::move(run);
  report.findings = std::move(counted.findings);
  counted.findings.clear();
  report.tokens = ReportTokens{std::move(counted), manifest.training.num_label_tokens, manifest.microbatch};
  return report;
}

void write_tokens(JsonWriter& json, const ReportTokens& tokens) {
  const LabelTokens& counted = tokens.counted;
  json.open_member("labels", '{', Layout::lines);
  json.member("ignore_index", counted.ignore_index);
  write_counts(json, counted.total);
  json.member("tokens_without_tail", counted.total.elements - counted.total.tail_padding);
  json.member("recorded_label_tokens", tokens.recorded);
  json.member("dp_axes", counted.dp_axes);
  json.member("coordinates", counted.coordinates);
  json.member("coordinates_counted", counted.coordinates_counted);
  json.close();
  write_microbatch(json, tokens.microbatch);
  json.open_member("microbatches", '[', Layout::lines);
  for (const LabelCounts& counts : counted.by_microbatch) {
    json.open('{', Layout::one_line);
    write_counts(json, counts);
    json.close();
  }
  json.close();
  json.open_member("ranks", '[', Layout::lines);
  for (const RankLabels& rank : counted.ranks) {
    json.open('{', Layout::one_line);
    json.member("rank", rank.rank);
    json.member("coordinate", rank.coordinate);
    json.member("counted", rank.counted);
    json.member("microbatches", rank.counts.microbatches);
    write_counts(json, rank.counts);
    json.close();
  }
  json.close();
}

void write_tokens_csv(const ReportTokens& tokens, std::ostream& out) {
  out << "rank,coordinate,counted,microbatches,sequences,elements,label_tokens,tail_padding\n";
  for (const RankLabels& rank : tokens.counted.ranks) {
    out << fmt::format("{},{},{},{},{},{},{},{}\n", rank.rank, rank.coordinate, rank.counted, rank.counts.microbatches,
                       rank.counts.sequences, rank.counts.elements, rank.counts.label_tokens, rank.counts.tail_padding);
  }
}

void write_tokens(const Report& report, const TextStyle& style, std::ostream& out) {
  const ReportTokens& tokens = *report.tokens;
  const LabelTokens& counted = tokens.counted;
  const LabelCounts& total = counted.total;
  write_head(report, style, out);
  write_ranks(counted, style, out);

  line(out, style, "label tokens", grouped(total.label_tokens),
       fmt::format("of {} ({}), without the label {}", gradclip::counted(total.elements, "label", "labels"),
                   part_text(total.label_tokens, total.elements), counted.ignore_index),
       Ink::strong);
  if (tokens.recorded) {
    line(out, style, "recorded", fmt::to_string(*tokens.recorded), "label tokens that the step divided by");
  }
  line(out, style, "tail padding", grouped(total.tail_padding),
       fmt::format("{} without it", gradclip::counted(total.elements - total.tail_padding, "label", "labels")));
  write_microbatches(tokens, style, out);
  std::vector<std::string> axes;
  for (const std::string& axis : counted.dp_axes) axes.push_back(printable(axis));
  line(out, style, "coordinates",
       fmt::format("{} of {}", grouped(counted.coordinates_counted), grouped(counted.coordinates)),
       axes.empty() ? counted.coordinates == 1 ? "" : "ranks, each with labels of its own" : comma_separated(axes));
  write_first_findings(report, style, out);
  out << '\n';
  const ReportRun& run = *report.run;
  line(out, style, "time", human_seconds(run.seconds_total));
  line(out, style, "processes", fmt::format("{}, {}", run.processes, printable(run.communicator)));
}

}  // namespace gradclip
