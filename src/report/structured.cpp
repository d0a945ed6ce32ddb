#include "gradclip/report/structured.hpp"

#include <fmt/format.h>

#include <ostream>
#include <string_view>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/report/html.hpp"
#include "gradclip/report/structured_pieces.hpp"

namespace gradclip {
namespace {

using Layout = JsonWriter::Layout;

void write_meshes(JsonWriter& json, const std::vector<ReportMesh>& meshes) {
  json.open_member("meshes", '[', Layout::lines);
  for (const ReportMesh& mesh : meshes) {
    json.open('{', Layout::one_line);
    json.member("name", mesh.name);
    json.member("dim_names", mesh.dim_names);
    json.member("shape", mesh.shape);
    json.member("ranks", mesh.ranks);
    json.member("device_mesh", mesh.device_mesh);
    json.member("moe_mesh", mesh.moe_mesh);
    json.close();
  }
  json.close();
}

void write_contents(JsonWriter& json, const Report& report) {
  const ReportContents& contents = *report.contents;
  json.member("state", contents.state);
  json.member("producer", contents.producer);
  write_microbatch(json, contents.microbatch);
  const TrainingRecord& training = contents.training;
  json.open_member("training", '{', Layout::lines);
  json.member("max_grad_norm", training.max_grad_norm);
  json.member("norm_type", training.norm_type);
  json.member("pp_enabled", training.pp_enabled);
  json.member("pp_axis_name", training.pp_axis_name);
  json.member("ep_axis_name", training.ep_axis_name);
  json.member("num_label_tokens", training.num_label_tokens);
  json.member("dp_group_size", training.dp_group_size);
  json.member("expert_tp_replication_factor", training.expert_tp_replication_factor);
  json.member("foreach", training.foreach);
  json.member("use_torch_clip_grad_norm", training.use_torch_clip_grad_norm);
  json.member("ignore_index", training.ignore_index);
  json.member("grad_norm", training.grad_norm);
  json.close();
  write_meshes(json, report.meshes);
  json.open_member("plain_tensors", '[', Layout::lines);
  for (const ReportPlainTensor& tensor : contents.plain_tensors) {
    json.open('{', Layout::one_line);
    json.member("name", report.parameters[tensor.parameter].name);
    json.member("copies", tensor.copies);
    json.member("ranks", tensor.ranks);
    json.close();
  }
  json.close();
  json.member("manifest_checksum", contents.has_checksum);
  json.member("files_with_checksum", contents.files_with_checksum);
}

/// There is none of no elements.
std::optional<double> mean_of(const ReportStatistics& measured) {
  return measured.elements != 0 ? std::optional<double>(measured.mean) : std::nullopt;
}

void write_norm(JsonWriter& json, const ReportNorm& norm) {
  const std::optional<ReportStatistics>& measured = norm.statistics;
  const auto count = [&](std::uint64_t ReportStatistics::*field) {
    return measured ? std::optional<std::uint64_t>((*measured).*field) : std::nullopt;
  };
  json.open_member("norm", '{', Layout::lines);
  json.member("type", norm.type);
  json.member("total", norm.total);
  json.member("elements", count(&ReportStatistics::elements));
  json.member("zeros", count(&ReportStatistics::zeros));
  json.member("subnormals", count(&ReportStatistics::subnormals));
  json.member("nan", count(&ReportStatistics::nan));
  json.member("posinf", count(&ReportStatistics::posinf));
  json.member("neginf", count(&ReportStatistics::neginf));
  json.member("max_abs", measured ? std::optional<double>(measured->max_abs) : std::nullopt);
  json.member("min_abs", measured ? measured->min_abs : std::nullopt);
  json.member("mean", measured ? mean_of(*measured) : std::nullopt);
  if (norm.histogram) write_histogram(json, *norm.histogram);
  json.close();
}

void write_clip(JsonWriter& json, const ReportClip& clip) {
  json.open_member("clip", '{', Layout::lines);
  json.member("max_norm", clip.max_norm);
  json.member("coefficient", clip.coefficient);
  json.member("clipped", clip.clipped);
  json.member("total_after", clip.total_after);
  json.member("nonfinite", clip.nonfinite);
  json.member("skipped", clip.skipped);
  json.close();
}

void write_reference(JsonWriter& json, const ReportReference& reference) {
  json.open_member("reference", '{', Layout::lines);
  json.member("arithmetic", reference.arithmetic);
  json.member("note", reference.note);
  json.open_member("totals", '[', Layout::lines);
  for (const ReportReferenceTotal& total : reference.totals) {
    json.open('{', Layout::one_line);
    json.member("total", total.total);
    json.member("coefficient", total.coefficient);
    json.member("ranks", total.ranks);
    json.close();
  }
  json.close();
  json.open_member("recorded", '{', Layout::one_line);
  json.member("grad_norm", reference.recorded);
  if (reference.recorded_type) json.member("norm_type", *reference.recorded_type);
  json.member("distance", reference.recorded_distance);
  json.member("distance_to_nearest_reference", reference.recorded_distance_reference);
  json.close();
  json.close();
}

/// What groups, stages and types have in common.
template <class Entry>
void write_sums(JsonWriter& json, const Entry& entry) {
  json.member("parameters", entry.parameters);
  json.member("elements", entry.elements);
  json.member("bytes", entry.bytes);
  json.member("norm", entry.norm);
  json.member("share", entry.share);
}

void write_groupings(JsonWriter& json, const Report& report) {
  json.open_member("groups", '[', Layout::lines);
  for (const ReportGroup& group : report.groups) {
    json.open('{', Layout::one_line);
    json.member("mesh", group.mesh);
    json.member("placements", group.placements);
    write_sums(json, group);
    json.close();
  }
  json.close();
  json.open_member("stages", '[', Layout::lines);
  for (const ReportStage& stage : report.stages) {
    json.open('{', Layout::one_line);
    json.member("stage", stage.stage);
    json.member("model_parts", stage.model_parts);
    write_sums(json, stage);
    json.close();
  }
  json.close();
  json.open_member("dtypes", '[', Layout::lines);
  for (const ReportType& type : report.dtypes) {
    json.open('{', Layout::one_line);
    json.member("dtype", name(type.dtype));
    write_sums(json, type);
    json.close();
  }
  json.close();
}

void write_parameter(JsonWriter& json, const Report& report, const ReportParameter& parameter) {
  const ReportGroup& group = report.groups[parameter.group];
  const std::optional<ReportStatistics>& measured = parameter.statistics;
  const auto count = [&](std::uint64_t ReportStatistics::*field) {
    return measured ? std::optional<std::uint64_t>((*measured).*field) : std::nullopt;
  };
  json.open('{', Layout::one_line);
  json.member("name", parameter.name);
  json.member("model_part", parameter.model_part);
  json.member("shape", parameter.shape);
  json.member("dtype", name(parameter.dtype));
  json.member("mesh", group.mesh);
  json.member("placements", group.placements);
  if (parameter.gradient_placements) json.member("gradient_placements", *parameter.gradient_placements);
  json.member("expert", parameter.expert);
  json.member("counted", parameter.counted);
  json.member("none", parameter.none);
  json.member("elements", parameter.elements);
  json.member("bytes", parameter.bytes);
  json.member("norm", parameter.norm);
  json.member("share", parameter.share);
  json.member("max_abs", measured ? std::optional<double>(measured->max_abs) : std::nullopt);
  json.member("min_abs", measured ? measured->min_abs : std::nullopt);
  json.member("mean", measured ? mean_of(*measured) : std::nullopt);
  json.member("zeros", count(&ReportStatistics::zeros));
  json.member("subnormals", count(&ReportStatistics::subnormals));
  json.member("nan", count(&ReportStatistics::nan));
  json.member("posinf", count(&ReportStatistics::posinf));
  json.member("neginf", count(&ReportStatistics::neginf));
  if (parameter.first_nonfinite) {
    json.open_member("first_nonfinite", '{', Layout::one_line);
    json.member("index", parameter.first_nonfinite->index);
    json.member("rank", parameter.first_nonfinite->rank);
    json.close();
  } else {
    json.member("first_nonfinite", nullptr);
  }
  if (parameter.histogram) write_histogram(json, *parameter.histogram);
  json.close();
}

void write_view(JsonWriter& json, const ReportView& view) {
  json.open_member("view", '{', Layout::lines);
  json.member("by", name(view.by));
  json.member("depth", view.depth);
  json.open_member("lines", '[', Layout::lines);
  for (const ReportViewLine& line : view.lines) {
    const ReportStatistics& measured = line.statistics;
    json.open('{', Layout::one_line);
    json.member("name", line.name);
    json.member("parameters", line.parameters);
    json.member("elements", measured.elements);
    json.member("norm", line.norm);
    json.member("share", line.share);
    json.member("max_abs", measured.max_abs);
    json.member("min_abs", measured.min_abs);
    json.member("mean", mean_of(measured));
    json.member("zeros", measured.zeros);
    json.member("subnormals", measured.subnormals);
    json.member("nan", measured.nan);
    json.member("posinf", measured.posinf);
    json.member("neginf", measured.neginf);
    if (line.histogram) write_histogram(json, *line.histogram);
    json.close();
  }
  json.close();
  json.close();
}

void write_verification(JsonWriter& json, const ReportVerification& verification) {
  json.open_member("checked", '{', Layout::one_line);
  json.member("manifest", verification.manifest);
  json.member("complete", verification.manifest && verification.complete);
  json.member("files", verification.files);
  json.member("shards", verification.shards);
  json.close();
  json.open_member("checksums", '{', Layout::one_line);
  json.member("manifest", verification.manifest_checksum);
  json.member("files", verification.file_checksums);
  json.member("files_compared", verification.files_compared);
  json.member("shards", verification.shard_checksums);
  json.close();
}

void write_view_csv(const ReportView& view, std::ostream& out) {
  out << name(view.by) << ",parameters,elements,norm,share,max_abs,min_abs,mean,zeros,subnormals,nan,posinf,neginf";
  if (!view.lines.empty() && view.lines.front().histogram) out << histogram_csv_header();
  out << '\n';
  for (const ReportViewLine& line : view.lines) {
    const ReportStatistics& measured = line.statistics;
    out << fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{}", csv_text(line.name), line.parameters,
                       measured.elements, csv_number(line.norm), csv_number(line.share), csv_number(measured.max_abs),
                       csv_number(measured.min_abs), csv_number(mean_of(measured)), measured.zeros, measured.subnormals,
                       measured.nan, measured.posinf, measured.neginf);
    if (line.histogram) out << histogram_csv(*line.histogram);
    out << '\n';
  }
}

void write_findings_csv(const Report& report, std::ostream& out) {
  out << "kind,parameter,ranks,index,value,message\n";
  for (const Finding& finding : report.findings) {
    const std::string index = finding.index ? fmt::format("{}", fmt::join(*finding.index, " ")) : std::string();
    out << fmt::format("{},{},{},{},{},{}\n", csv_text(finding.kind), csv_text(finding.parameter),
                       fmt::join(finding.ranks, " "), index, csv_number(finding.value), csv_text(finding.message));
  }
}

}  // namespace

ReportFormat report_format(const std::filesystem::path& file) {
  const std::string ending = file.extension().string();
  if (ending == ".json") return ReportFormat::json;
  if (ending == ".csv") return ReportFormat::csv;
  if (ending == ".xml") return ReportFormat::junit;
  if (ending == ".html") return ReportFormat::html;
  ErrorText text;
  text.where = "--report " + gradclip::quoted(file.string());
  text.expected = "a name that ends in .json, .csv, .html or .xml";
  if (ending.empty()) {
    text.found = "the name has no ending to tell the format by";
  } else {
    text.found = "unknown ending " + gradclip::quoted(ending);
  }
  throw Error(ExitCode::usage, std::move(text));
}

void write_json(const Report& report, std::ostream& out) {
  JsonWriter json(out);
  json.open('{', Layout::lines);
  json.member("format", "gradclip.report");
  json.member("version", kReportVersion);
  json.member("command", report.command);
  if (!report.sweep) write_dump(json, "dump", report.dump);
  if (report.command == "clip" || report.merge) json.member("output", report.output);
  if (report.accumulate) write_accumulate(json, report);
  if (report.diff) write_dump(json, "other", report.diff->other);
  if (report.run) write_run(json, *report.run);
  if (report.contents) {
    write_contents(json, report);
  } else if (report.norm) {
    write_meshes(json, report.meshes);
  }
  if (report.scale) {
    json.open_member("scale", '{', Layout::lines);
    json.member("label_token_divisor", report.scale->label_token_divisor);
    json.member("expert_divisor", report.scale->expert_divisor);
    json.member("explanation", report.scale->explanation);
    json.close();
  }
  if (report.norm) write_norm(json, *report.norm);
  if (report.clip) write_clip(json, *report.clip);
  if (report.reference) {
    write_reference(json, *report.reference);
  } else if (report.norm) {
    json.member("reference", nullptr);
  }
  if (report.verification) {
    write_verification(json, *report.verification);
  } else if (report.diff) {
    write_diff(json, *report.diff);
  } else if (report.check) {
    write_check(json, report);
  } else if (report.sweep) {
    write_sweep(json, *report.sweep);
  } else if (report.merge) {
    write_merge(json, *report.merge);
  } else if (report.tokens) {
    write_tokens(json, *report.tokens);
  } else if (!report.accumulate) {
    if (report.view) write_view(json, *report.view);
    write_groupings(json, report);
    json.open_member("parameters", '[', Layout::lines);
    for (const ReportParameter& parameter : report.parameters) write_parameter(json, report, parameter);
    json.close();
  }
  write_findings(json, report.findings);
  json.close();
}

void write_json(const FactSheet& sheet, std::ostream& out) {
  JsonWriter json(out);
  json.open('{', Layout::lines);
  json.member("format", "gradclip.report");
  json.member("version", kReportVersion);
  json.member("command", sheet.command);
  for (const FactSection& section : sheet.sections) {
    json.open_member(section.name, '{', Layout::lines);
    for (const Fact& fact : section.facts) {
      for (const auto& [key, value] : fact.values) json.member(key, value);
    }
    json.close();
  }
  json.close();
}

void write_csv(const FactSheet& sheet, std::ostream& out) {
  out << "section,fact,value\n";
  for (const FactSection& section : sheet.sections) {
    for (const Fact& fact : section.facts) {
      for (const auto& [key, value] : fact.values) {
        out << fmt::format("{},{},{}\n", csv_text(section.name), csv_text(key), csv_value(value));
      }
    }
  }
}

void write_csv(const Report& report, std::ostream& out) {
  if (report.verification) {
    write_findings_csv(report, out);
    return;
  }
  if (report.diff) {
    write_diff_csv(*report.diff, out);
    return;
  }
  if (report.check) {
    write_check_csv(*report.check, out);
    return;
  }
  if (report.sweep) {
    write_sweep_csv(*report.sweep, out);
    return;
  }
  if (report.merge) {
    write_merge_csv(*report.merge, out);
    return;
  }
  if (report.tokens) {
    write_tokens_csv(*report.tokens, out);
    return;
  }
  if (report.accumulate) {
    write_accumulate_csv(*report.accumulate, out);
    return;
  }
  if (report.view) {
    write_view_csv(*report.view, out);
    return;
  }
  out << "name,model_part,shape,dtype,mesh,placements,expert,counted,elements,norm,share,max_abs,min_abs,mean,"
         "zeros,subnormals,nan,posinf,neginf,first_nonfinite_index,first_nonfinite_rank";
  if (report.norm && report.norm->histogram) out << histogram_csv_header();
  out << '\n';
  for (const ReportParameter& parameter : report.parameters) {
    const ReportGroup& group = report.groups[parameter.group];
    out << fmt::format("{},{},{},{},{},{},{},{},{},{},{},", csv_text(parameter.name), parameter.model_part,
                       csv_text(fmt::format("{}", fmt::join(parameter.shape, "x"))), name(parameter.dtype),
                       csv_text(group.mesh.value_or("")), csv_text(fmt::format("{}", fmt::join(group.placements, " "))),
                       parameter.expert, parameter.counted, parameter.elements, csv_number(parameter.norm),
                       csv_number(parameter.share));
    if (const std::optional<ReportStatistics>& measured = parameter.statistics) {
      out << fmt::format("{},{},{},{},{},{},{},{},", csv_number(measured->max_abs), csv_number(measured->min_abs),
                         csv_number(mean_of(*measured)), measured->zeros, measured->subnormals, measured->nan,
                         measured->posinf, measured->neginf);
    } else {
      out << ",,,,,,,,";
    }
    if (parameter.first_nonfinite) {
      out << fmt::format("{},{}", fmt::join(parameter.first_nonfinite->index, " "), parameter.first_nonfinite->rank);
    } else {
      out << ',';
    }
    if (parameter.histogram) out << histogram_csv(*parameter.histogram);
    out << '\n';
  }
}

void write(const Report& report, ReportFormat format, std::ostream& out) {
  switch (format) {
    case ReportFormat::json:
      write_json(report, out);
      return;
    case ReportFormat::csv:
      write_csv(report, out);
      return;
    case ReportFormat::junit:
      write_junit(report, out);
      return;
    case ReportFormat::html:
      write_html(report, out);
      return;
  }
}

}  // namespace gradclip
