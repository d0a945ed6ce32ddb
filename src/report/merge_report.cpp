#include "gradclip/report/report.hpp"

namespace gradclip {

Report merge_report(const std::filesystem::path& dump, const Manifest& manifest, const std::filesystem::path& output,
                    MergeFormat format, const MergeResult& result, bool labels, ReportRun run) {
  Report report;
  report.command = "merge";
  report.dump = report_dump(dump, manifest);
  report.run = std::move(run);
  report.output = output.string();
  ReportMerge& merge = report.merge.emplace();
  merge.format = format == MergeFormat::dump ? "dump" : "safetensors";
  for (const MergedTensor& from : result.tensors) {
    ReportTensor& tensor = merge.tensors.emplace_back();
    tensor.name = from.name;
    tensor.parameter = manifest.parameters[from.tensor.parameter].name;
    tensor.shape = from.tensor.shape;
    tensor.dtype = from.dtype;
    tensor.recorded_dtype = from.tensor.dtype;
    tensor.scale_inv = from.scale_inv;
    tensor.elements = from.tensor.elements;
    tensor.bytes = from.bytes();
    tensor.status = from.stand_in ? "repeated" : from.none ? "none" : "written";
    merge.bytes += tensor.bytes;
  }
  if (labels) merge.not_kept.emplace_back("labels");
  if (!manifest.meshes.empty()) merge.not_kept.emplace_back("meshes");
  if (format == MergeFormat::dump && !manifest.moe_meshes.empty()) merge.not_kept.emplace_back("moe_mesh");
  if (format == MergeFormat::safetensors) merge.not_kept.emplace_back("training");
  report.findings = result.findings;
  return report;
}

}  // namespace gradclip
