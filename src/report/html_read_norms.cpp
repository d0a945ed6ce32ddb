#include "gradclip/report/html_readers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "gradclip/base/error.hpp"
#include "gradclip/report/html_fields.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {

using namespace page_fields;

namespace {

/// Exponents of float64 with its subnormals: 2^-1074 to 2^1023.
constexpr std::int64_t kLowestExponent = -1074;
constexpr std::int64_t kHighestExponent = 1023;

PageHistogram read_histogram(const JsonField& field) {
  PageHistogram histogram;
  const JsonField exponents = field.at("exponents");
  // Null or no count: there is no finite element but zeros.
  if (const std::optional<JsonField> first = exponents.find("first")) {
    histogram.first = first->integer(kLowestExponent, kHighestExponent);
  }
  each(exponents, "counts", [&](const JsonField& each_count) { histogram.counts.push_back(count(each_count)); });
  if (histogram.counts.size() > static_cast<std::size_t>(kHighestExponent - histogram.first + 1)) {
    exponents.at("counts").fail("counts beyond the exponent 1023", "exponents of float64");
  }
  histogram.zeros = optional_count(field, "zeros").value_or(0);
  for (const char* key : {"nan", "posinf", "neginf"}) histogram.nonfinite += optional_count(field, key).value_or(0);
  if (const std::optional<JsonField> casts = field.find("casts")) {
    for (const auto& [type, counts] : casts->object().items()) {
      PageCast& cast = histogram.casts.emplace_back();
      cast.type = printable(type);
      const JsonField of_type = casts->member(type, counts);
      for (const auto& [what, number] : of_type.object().items()) {
        cast.counts.emplace_back(spaced(printable(what)), count(of_type.member(what, number)));
      }
    }
  }
  return histogram;
}

/// What a parameter and the whole have in common.
void read_statistics(const JsonField& field, PageParameter& parameter) {
  parameter.elements = optional_count(field, "elements").value_or(0);
  parameter.max_abs = optional_number(field, "max_abs");
  parameter.min_abs = optional_number(field, "min_abs");
  parameter.mean = optional_number(field, "mean");
  parameter.zeros = optional_count(field, "zeros");
  parameter.subnormals = optional_count(field, "subnormals");
  parameter.nan = optional_count(field, "nan").value_or(0);
  parameter.posinf = optional_count(field, "posinf").value_or(0);
  parameter.neginf = optional_count(field, "neginf").value_or(0);
  if (const std::optional<JsonField> histogram = field.find("histogram")) {
    parameter.histogram = read_histogram(*histogram);
  }
}

PageParameter read_parameter(const JsonField& field) {
  PageParameter parameter;
  parameter.name = text(field.at("name"));
  parameter.shape = shape_text(field);
  parameter.dtype = text(field, "dtype");
  parameter.mesh = text(field, "mesh");
  parameter.placements = fmt::format("{}", fmt::join(texts(field, "placements"), ", "));
  parameter.gradient_placements = fmt::format("{}", fmt::join(texts(field, "gradient_placements"), ", "));
  parameter.expert = flag(field, "expert", false);
  parameter.counted = flag(field, "counted", true);
  parameter.bytes = optional_count(field, "bytes").value_or(0);
  read_statistics(field, parameter);
  parameter.norm = optional_number(field, "norm");
  parameter.share = optional_number(field, "share");
  if (const std::optional<JsonField> first = field.find("first_nonfinite")) {
    parameter.first_nonfinite =
        fmt::format("{} on rank {}", index_text(integers(*first, "index")), count(first->at("rank")));
  }
  return parameter;
}

PageMesh read_mesh(const JsonField& field) {
  PageMesh mesh;
  mesh.name = text(field.at("name"));
  mesh.dim_names = texts(field, "dim_names");
  mesh.shape = integers(field, "shape");
  mesh.ranks = ranks(field, "ranks");
  mesh.device_mesh = flag(field, "device_mesh", false);
  std::size_t size = 1;
  for (const std::int64_t extent : mesh.shape) {
    const bool fits = extent >= 1 && static_cast<std::uint64_t>(extent) <= mesh.ranks.size() / size;
    if (!fits) field.at("shape").fail(fmt::format("it does not hold {} ranks", mesh.ranks.size()), "the ranks' shape");
    size *= static_cast<std::size_t>(extent);
  }
  if (size != mesh.ranks.size() || mesh.shape.empty()) {
    field.at("shape").fail(fmt::format("it does not hold {} ranks", mesh.ranks.size()), "the ranks' shape");
  }
  if (mesh.dim_names.size() != mesh.shape.size()) {
    field.at("dim_names")
        .fail(fmt::format("has {} names", mesh.dim_names.size()), fmt::format("{}", mesh.shape.size()));
  }
  return mesh;
}

PagePart read_part(const JsonField& field, std::string name) {
  PagePart part;
  part.name = std::move(name);
  part.parameters = count(field.at("parameters"));
  part.elements = count(field.at("elements"));
  part.norm = optional_number(field, "norm");
  part.share = optional_number(field, "share");
  if (const std::optional<JsonField> histogram = field.find("histogram")) part.histogram = read_histogram(*histogram);
  return part;
}

std::vector<Placement> read_placements(const JsonField& group) {
  constexpr std::size_t kMostDimensions = 32;  // of any tensor: a negative dimension counts from its end
  std::vector<Placement> placements;
  each(group, "placements", [&](const JsonField& field) {
    try {
      placements.push_back(parse_placement(field.string(), kMostDimensions));
    } catch (const Error& error) {
      field.fail(error.text().found, error.text().expected);
    }
  });
  return placements;
}

void read_parts(const JsonField& root, PageReport& report) {
  each(root, "groups", [&](const JsonField& field) {
    const std::string mesh = text(field, "mesh");
    PagePart& group = report.groups.emplace_back(read_part(field, mesh.empty() ? "plain tensors" : mesh));
    if (mesh.empty()) return;
    group.placements = read_placements(field);
    group.name += ' ' + to_string(group.placements);
    const auto known = std::find_if(report.meshes.begin(), report.meshes.end(),
                                    [&](const PageMesh& each_mesh) { return each_mesh.name == mesh; });
    if (known == report.meshes.end()) return;
    group.mesh = static_cast<std::size_t>(known - report.meshes.begin());
    if (group.placements.size() != known->shape.size()) {
      field.at("placements")
          .fail(fmt::format("has {} placements", group.placements.size()),
                fmt::format("{}, as many as the mesh has dimensions", known->shape.size()));
    }
  });
  const auto add = [&](std::string title, const JsonField& from, const char* list, const auto& name_of) {
    PageParts parts{std::move(title), {}};
    each(from, list, [&](const JsonField& field) { parts.parts.push_back(read_part(field, name_of(field))); });
    if (!parts.parts.empty()) report.parts.push_back(std::move(parts));
  };
  if (const std::optional<JsonField> view = root.find("view")) {
    add(text(view->at("by")), *view, "lines", [](const JsonField& field) {
      const std::string name = text(field.at("name"));
      return name.empty() ? std::string("(root)") : name;
    });
  }
  add("pipeline stage", root, "stages", [](const JsonField& field) {
    const std::string stage = optional_scalar(field, "stage");
    return stage.empty() ? std::string("outside the device mesh") : stage;
  });
  add("dtype", root, "dtypes", [](const JsonField& field) { return text(field.at("dtype")); });
}

void read_norm(const JsonField& root, PageReport& report) {
  const std::optional<JsonField> norm = root.find("norm");
  if (!norm) return;
  report.norm_type = norm->at("type").number();
  report.total = norm->at("total").number();
  if (norm->find("elements")) {
    report.all.emplace();
    read_statistics(*norm, *report.all);
  }
  if (const std::optional<JsonField> scale = root.find("scale")) report.scale = text(*scale, "explanation");
}

void read_clip(const JsonField& root, PageReport& report) {
  const std::optional<JsonField> clip = root.find("clip");
  if (!clip) return;
  report.clips = true;
  report.max_norm = optional_number(*clip, "max_norm");
  report.coefficient = optional_number(*clip, "coefficient");
  report.total_after = optional_number(*clip, "total_after");
  report.outcome = flag(*clip, "skipped", false)   ? "not clipped: the total is not finite"
                   : flag(*clip, "clipped", false) ? "clipped"
                                                   : "not clipped";
}

void read_reference(const JsonField& root, PageReport& report) {
  const std::optional<JsonField> reference = root.find("reference");
  if (!reference) return;
  report.arithmetic = text(*reference, "arithmetic");
  report.note = text(*reference, "note");
  each(*reference, "totals", [&](const JsonField& field) {
    report.totals.push_back({field.at("total").number(), optional_number(field, "coefficient"), ranks(field, "ranks")});
  });
  if (const std::optional<JsonField> recorded = reference->find("recorded")) {
    report.recorded = optional_number(*recorded, "grad_norm");
    report.recorded_type = optional_number(*recorded, "norm_type");
    report.recorded_distance = optional_number(*recorded, "distance");
  }
}

}  // namespace

void read_measured(const JsonField& root, PageReport& report) {
  read_norm(root, report);
  read_clip(root, report);
  read_reference(root, report);
  each(root, "meshes", [&](const JsonField& field) { report.meshes.push_back(read_mesh(field)); });
  read_parts(root, report);
  each(root, "parameters", [&](const JsonField& field) { report.parameters.push_back(read_parameter(field)); });
}

void read_sweep(const JsonField& root, PageReport& report) {
  each(root, "steps", [&](const JsonField& field) {
    PageStep& step = report.steps.emplace_back();
    step.path = text(field.at("path"));
    step.step = optional_integer(field, "step");
    step.type = optional_number(field, "type");
    step.total = field.at("total").number();
    step.findings = optional_count(field, "findings");
  });
  each(root, "sweep", [&](const JsonField& field) {
    PageSweepLine& line = report.sweep.emplace_back();
    line.max_norm = field.at("max_norm").number();
    line.clipped = count(field.at("clipped"));
    line.steps = count(field.at("steps"));
    if (const std::optional<JsonField> coefficient = field.find("coefficient")) {
      line.least = optional_number(*coefficient, "min");
      line.median = optional_number(*coefficient, "median");
      line.mean = optional_number(*coefficient, "mean");
    }
  });
}

}  // namespace gradclip
