#include <fmt/format.h>

#include "gradclip/report/structured_pieces.hpp"

namespace gradclip {

using Layout = JsonWriter::Layout;

void write_merge(JsonWriter& json, const ReportMerge& merge) {
  json.member("merged_as", merge.format);
  json.member("merged_bytes", merge.bytes);
  json.member("not_kept", merge.not_kept);
  json.open_member("parameters", '[', Layout::lines);
  for (const ReportTensor& tensor : merge.tensors) {
    json.open('{', Layout::one_line);
    json.member("name", tensor.parameter);
    json.member("name_in_output", tensor.name);
    json.member("status", tensor.status);
    json.member("shape", tensor.shape);
    json.member("dtype", name(tensor.recorded_dtype));
    json.member("dtype_in_output", name(tensor.dtype));
    json.member("scale_inv", tensor.scale_inv ? std::optional<double>(*tensor.scale_inv) : std::nullopt);
    json.member("elements", tensor.elements);
    json.member("bytes", tensor.bytes);
    json.close();
  }
  json.close();
}

void write_merge_csv(const ReportMerge& merge, std::ostream& out) {
  out << "name,name_in_output,status,shape,dtype,dtype_in_output,scale_inv,elements,bytes\n";
  for (const ReportTensor& tensor : merge.tensors) {
    const std::optional<double> scale_inv = tensor.scale_inv ? std::optional<double>(*tensor.scale_inv) : std::nullopt;
    out << fmt::format("{},{},{},{},{},{},{},{},{}\n", csv_text(tensor.parameter), csv_text(tensor.name), tensor.status,
                       csv_text(fmt::format("{}", fmt::join(tensor.shape, "x"))), name(tensor.recorded_dtype),
                       name(tensor.dtype), csv_number(scale_inv), tensor.elements, tensor.bytes);
  }
}

}  // namespace gradclip
