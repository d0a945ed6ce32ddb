#include "gradclip/report/html_readers.hpp"

#include "gradclip/report/html_fields.hpp"

namespace gradclip {

using namespace page_fields;

namespace {

PageLabels read_labels(const JsonField& field) {
  return {count(field.at("sequences")), count(field.at("elements")), count(field.at("label_tokens")),
          count(field.at("tail_padding"))};
}

/// As the text report has it: "on", "off" or, of what was not recorded, nothing.
std::string flag_text(const JsonField& object, const char* key, const char* yes, const char* no) {
  if (!object.find(key)) return {};
  return flag(object, key, false) ? yes : no;
}

}  // namespace

void read_tokens(const JsonField& root, PageReport& report) {
  each(root, "ranks", [&](const JsonField& field) {
    report.rank_labels.push_back({count(field.at("rank")), count(field.at("coordinate")), flag(field, "counted", true),
                                  count(field.at("microbatches")), read_labels(field)});
  });
  each(root, "microbatches", [&](const JsonField& field) { report.microbatch_labels.push_back(read_labels(field)); });
}

void read_accumulated(const JsonField& root, PageReport& report) {
  read_facts(root, "accumulated", report.contents);
  if (const std::optional<JsonField> output = root.find("output")) add_facts(*output, "output.", report.contents);
  each(root, "microbatches", [&](const JsonField& field) {
    report.microbatches.push_back(
        {count(field.at("index")), flag_text(field, "first_microbatch", "on", "off"),
         flag_text(field, "optimizer_step", "on", "off"), flag_text(field, "synchronised", "yes", "no"),
         optional_scalar(field, "schedule_step"), flag(field, "ends_window", false) ? "yes" : "no"});
  });
}

void read_merged(const JsonField& root, PageReport& report) {
  report.contents.emplace_back("output", text(root, "output"));
  for (const char* key : {"merged_as", "merged_bytes"}) {
    report.contents.emplace_back(spaced(key), optional_scalar(root, key));
  }
  each(root, "not_kept", [&](const JsonField& field) { report.contents.emplace_back("not kept", text(field)); });
  each(root, "parameters", [&](const JsonField& field) {
    PageTensor& tensor = report.tensors.emplace_back();
    tensor.name = text(field.at("name"));
    tensor.name_in_output = text(field, "name_in_output");
    tensor.status = text(field.at("status"));
    tensor.shape = shape_text(field);
    tensor.dtype = text(field, "dtype");
    tensor.dtype_in_output = text(field, "dtype_in_output");
    tensor.scale_inv = optional_number(field, "scale_inv");
    tensor.elements = count(field.at("elements"));
    tensor.bytes = count(field.at("bytes"));
  });
}

}  // namespace gradclip
