#include <fmt/format.h>

#include "gradclip/report/html_listings.hpp"
#include "gradclip/report/html_table.hpp"

namespace gradclip {
namespace {

using Kind = TableData::Kind;

void add_label_columns(TableData& table) {
  table.column("sequences", Kind::count);
  table.column("elements", Kind::count, "labels");
  table.column("label tokens", Kind::count, "labels other than the ignored one");
  table.column("tail padding", Kind::count, "ignored ones at the end of each sequence");
}

void add_label_cells(TableData& table, const PageLabels& labels) {
  table.cell(labels.sequences).cell(labels.elements).cell(labels.label_tokens).cell(labels.tail_padding);
}

void write_microbatch_labels(Markup& html, const PageReport& report) {
  if (report.microbatch_labels.empty()) return;
  TableData table("microbatches");
  table.column("microbatch", Kind::count);
  add_label_columns(table);
  for (std::size_t k = 0; k < report.microbatch_labels.size(); ++k) {
    table.row().cell(std::uint64_t{k});
    add_label_cells(table, report.microbatch_labels[k]);
  }
  table.write(html);
}

}  // namespace

void write_rank_label_table(Markup& html, const PageReport& report) {
  if (report.rank_labels.empty()) return;
  TableData table("ranks");
  table.column("rank", Kind::count);
  table.column("coordinate", Kind::count, "on the data-parallel axes");
  table.column("remarks", Kind::text, "copies do not count");
  table.column("microbatches", Kind::count);
  add_label_columns(table);
  for (const PageRankLabels& rank : report.rank_labels) {
    table.row().cell(rank.rank).cell(rank.coordinate).cell(rank.counted ? "" : "a copy").cell(rank.microbatches);
    add_label_cells(table, rank.labels);
  }
  table.write(html);
}

void write_microbatch_table(Markup& html, const PageReport& report) {
  write_microbatch_labels(html, report);
  if (report.microbatches.empty()) return;
  TableData table("microbatches");
  table.column("microbatch", Kind::count);
  table.column("first microbatch", Kind::text);
  table.column("optimizer step", Kind::text);
  table.column("synchronised", Kind::text);
  table.column("schedule step", Kind::text);
  table.column("ends a window", Kind::text);
  for (const PageMicrobatch& one : report.microbatches) {
    table.row()
        .cell(one.index)
        .cell(one.first_microbatch)
        .cell(one.optimizer_step)
        .cell(one.synchronised)
        .cell(one.schedule_step)
        .cell(one.ends_window);
  }
  table.write(html);
}

void write_tensor_table(Markup& html, const PageReport& report) {
  if (report.tensors.empty()) return;
  TableData table("parameters");
  table.column("parameter", Kind::name);
  table.column("status", Kind::text);
  table.column("shape", Kind::text);
  table.column("type", Kind::text);
  table.column("type in OUT", Kind::text);
  table.column("scale_inv", Kind::number, "of float8");
  table.column("elements", Kind::count);
  table.column("bytes", Kind::count);
  table.column("name in OUT", Kind::name);
  for (const PageTensor& tensor : report.tensors) {
    table.row()
        .cell(tensor.name)
        .cell(tensor.status)
        .cell(tensor.shape)
        .cell(tensor.dtype)
        .cell(tensor.dtype_in_output)
        .cell(tensor.scale_inv)
        .cell(tensor.elements)
        .cell(tensor.bytes)
        .cell(tensor.name_in_output);
  }
  table.write(html);
}

}  // namespace gradclip
