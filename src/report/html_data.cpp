#include "gradclip/report/html_data.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

using nlohmann::json;

/// Exponents of float64 with its subnormals: 2^-1074 to 2^1023.
constexpr std::int64_t kLowestExponent = -1074;
constexpr std::int64_t kHighestExponent = 1023;
/// That a dump may have.
constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;

std::uint64_t count(const JsonField& field) {
  if (field.value().is_number_unsigned()) return field.value().get<std::uint64_t>();
  return static_cast<std::uint64_t>(field.integer(0, std::numeric_limits<std::int64_t>::max()));
}

std::optional<std::uint64_t> optional_count(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  return field ? std::optional(count(*field)) : std::nullopt;
}

std::optional<double> optional_number(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  return field ? std::optional(field->number()) : std::nullopt;
}

/// As it may be shown: a name with a line feed is one line everywhere, and is found by what is seen of it.
std::string text(const JsonField& field) {
  return printable(field.string());
}

std::string text(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  return field ? text(*field) : std::string();
}

bool flag(const JsonField& object, const char* key, bool without) {
  const std::optional<JsonField> field = object.find(key);
  return field ? field->boolean() : without;
}

template <class Take>
void each(const JsonField& object, const char* key, const Take& take) {
  const std::optional<JsonField> list = object.find(key);
  if (!list) return;
  for (std::size_t i = 0; i < list->array().size(); ++i) take(list->element(i));
}

std::vector<std::int64_t> integers(const JsonField& object, const char* key) {
  std::vector<std::int64_t> result;
  each(object, key, [&](const JsonField& field) {
    result.push_back(field.integer(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()));
  });
  return result;
}

std::vector<std::int32_t> ranks(const JsonField& object, const char* key) {
  std::vector<std::int32_t> result;
  each(object, key,
       [&](const JsonField& field) { result.push_back(static_cast<std::int32_t>(field.integer(0, kMostRanks - 1))); });
  return result;
}

std::vector<std::string> texts(const JsonField& object, const char* key) {
  std::vector<std::string> result;
  each(object, key, [&](const JsonField& field) { result.push_back(text(field)); });
  return result;
}

std::string index_or_nothing(const JsonField& object, const char* key) {
  return object.find(key) ? index_text(integers(object, key)) : std::string();
}

std::string shape_text(const JsonField& object) {
  const std::vector<std::int64_t> shape = integers(object, "shape");
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, " × "));
}

/// A scalar as the report has it.
std::string scalar_text(const JsonField& field) {
  if (field.value().is_string()) return text(field);
  if (field.value().is_structured()) field.fail("text, a number, true, false or null");
  return field.value().dump();
}

std::string optional_scalar(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  return field ? scalar_text(*field) : std::string();
}

PageDump read_dump(const JsonField& field) {
  PageDump dump;
  dump.path = text(field.at("path"));
  if (const std::optional<JsonField> step = field.find("step")) {
    dump.step = step->integer(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
  }
  dump.world_size = static_cast<std::uint64_t>(field.at("world_size").integer(0, kMostRanks));
  dump.parameters = count(field.at("parameters"));
  dump.elements = count(field.at("elements"));
  dump.bytes = count(field.at("bytes"));
  return dump;
}

/// "underflow_to_zero" as words.
std::string spaced(std::string key) {
  std::replace(key.begin(), key.end(), '_', ' ');
  return key;
}

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

std::optional<double> extreme(const JsonField& field, const char* key, std::string* index) {
  const std::optional<JsonField> found = field.find(key);
  if (!found) return std::nullopt;
  if (index != nullptr) *index = index_or_nothing(*found, "index");
  return found->at("value").number();
}

PageDifference read_difference(const JsonField& field) {
  PageDifference parameter;
  parameter.name = text(field.at("name"));
  parameter.name_in_other = text(field, "name_in_other");
  parameter.status = text(field.at("status"));
  parameter.shape = shape_text(field);
  parameter.dtype = text(field, "dtype");
  const std::string other = text(field, "dtype_in_other");
  if (parameter.dtype.empty()) {
    parameter.dtype = other;
  } else if (!other.empty() && other != parameter.dtype) {
    parameter.dtype += " / " + other;
  }
  parameter.elements = optional_count(field, "elements");
  parameter.different = optional_count(field, "different").value_or(0);
  parameter.nan_different = optional_count(field, "nan_different").value_or(0);
  parameter.max_abs = extreme(field, "max_abs", &parameter.max_abs_index);
  parameter.max_rel = extreme(field, "max_rel", nullptr);
  parameter.relative_l2 = optional_number(field, "relative_l2");
  parameter.relative_l2_epsilons = optional_number(field, "relative_l2_epsilons");
  parameter.cosine = optional_number(field, "cosine");
  parameter.norm_ratio = optional_number(field, "norm_ratio");
  parameter.first_different = index_or_nothing(field, "first_different");
  return parameter;
}

std::string rule_text(const JsonField& rule) {
  const std::string nan = flag(rule, "equal_nan", false) ? " A NaN equals a NaN." : " A NaN equals nothing.";
  if (const std::optional<std::uint64_t> ulps = optional_count(rule, "ulp")) {
    return fmt::format("Equal when at most {} numbers of the narrower type apart.{}", grouped(*ulps), nan);
  }
  const std::optional<double> relative = optional_number(rule, "rtol");
  return fmt::format("Equal when |a − b| ≤ {} + {} × |b|.{}", optional_number(rule, "atol").value_or(0.0),
                     relative ? fmt::format("{}", *relative) : "the epsilon of the narrower type", nan);
}

Finding read_finding(const JsonField& field) {
  Finding finding;
  finding.kind = text(field.at("kind"));
  finding.parameter = text(field, "parameter");
  finding.ranks = ranks(field, "ranks");
  if (field.find("index")) finding.index = integers(field, "index");
  finding.value = optional_number(field, "value");
  finding.message = text(field, "message");
  return finding;
}

/// Scalars of an object, those of its objects with a dot.
void add_facts(const JsonField& object, const std::string& before, std::vector<PageFact>& facts) {
  for (const auto& [key, value] : object.object().items()) {
    if (value.is_null() || value.is_array()) continue;
    const JsonField field = object.member(key, value);
    if (value.is_object()) {
      if (before.empty()) add_facts(field, key + ".", facts);
      continue;
    }
    std::string fact = scalar_text(field);
    if (!fact.empty()) facts.emplace_back(printable(before + key), std::move(fact));
  }
}

void read_facts(const JsonField& root, const char* key, std::vector<PageFact>& facts) {
  if (const std::optional<JsonField> field = root.find(key)) add_facts(*field, "", facts);
}

std::optional<double> number_of(const std::string& text) {
  double number = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

void read_run(const JsonField& root, PageReport& report) {
  constexpr std::string_view kBytes = "_bytes", kSeconds = "seconds.";
  read_facts(root, "run", report.run);
  for (auto& [key, value] : report.run) {
    const std::optional<double> number = number_of(value);
    if (number && key.ends_with(kBytes)) {
      key.resize(key.size() - kBytes.size());
      value = human_bytes(*number);
    } else if (number && key.starts_with(kSeconds)) {
      key = "time, " + key.substr(kSeconds.size());
      value = human_seconds(*number);
    }
    key = spaced(key);
  }
}

/// Any value as the report has it.
std::string value_text(const JsonField& object, const char* key) {
  const std::optional<JsonField> field = object.find(key);
  if (!field) return {};
  return field->value().is_string() ? text(*field) : printable(field->value().dump());
}

PageItem read_item(const JsonField& field) {
  return {text(field, "parameter"),         optional_scalar(field, "item"), optional_scalar(field, "status"),
          value_text(field, "expected"),    value_text(field, "found"),     optional_number(field, "deviation"),
          optional_number(field, "allowed")};
}

void read_check(const JsonField& root, PageReport& report) {
  each(root, "items", [&](const JsonField& field) { report.items.push_back(read_item(field)); });
  report.verdict = text(root, "outcome");
  report.summary = text(root, "summary");
  if (root.find("baseline_path")) report.baseline.emplace_back("baseline", text(root, "baseline_path"));
  read_facts(root, "baseline", report.baseline);
  each(root, "known_findings", [&](const JsonField& field) {
    report.known.push_back({text(field.at("kind")), text(field, "parameter"), flag(field, "seen", true)});
  });
  each(root, "changes", [&](const JsonField& field) { report.changes.push_back(read_finding(field)); });
}

void read_sweep(const JsonField& root, PageReport& report) {
  each(root, "steps", [&](const JsonField& field) {
    PageStep& step = report.steps.emplace_back();
    step.path = text(field.at("path"));
    if (const std::optional<JsonField> number = field.find("step")) {
      step.step = number->integer(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
    }
    step.total = field.at("total").number();
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

void read_checked(const JsonField& root, PageReport& report) {
  if (!root.find("checked")) return;
  const JsonField checked = root.at("checked"), checksums = root.at("checksums");
  const bool manifest = checked.at("manifest").boolean();
  const auto complete = checked.find("complete");  // reports of earlier versions have none
  const DifferingChecksums differ = differing_checksums(report.findings);
  report.checked.emplace_back("Manifest", !manifest                            ? "cannot be used"
                                          : complete && !complete->boolean()   ? "in part left out"
                                          : differ.manifest                    ? "differs from its checksum"
                                          : checksums.at("manifest").boolean() ? "as its checksum says"
                                                                               : "has no checksum");
  if (!manifest) return;
  const std::uint64_t files = count(checked.at("files")), shards = count(checked.at("shards"));
  const auto of = [](std::uint64_t some, std::uint64_t all) { return grouped(some) + " of " + grouped(all); };
  report.checked.emplace_back("Rank files read", of(files, report.dump.world_size));
  report.checked.emplace_back("Gradients in them", grouped(shards));
  report.checked.emplace_back("Files with a checksum", of(count(checksums.at("files")), report.dump.world_size));
  if (checksums.find("files_compared")) {  // reports of earlier versions have none
    report.checked.emplace_back("Files compared with it", grouped(count(checksums.at("files_compared"))));
  }
  report.checked.emplace_back("Files that differ", grouped(differ.files));
  report.checked.emplace_back("Gradients with a checksum", of(count(checksums.at("shards")), shards));
  report.checked.emplace_back("Gradients that differ", grouped(differ.gradients));
}

}  // namespace

PageReport read_page_report(std::string_view json_report, const std::string& where) {
  const JsonDocument document = parse_json(json_report, where);
  const JsonField root(document.root, where, "");
  if (const JsonField format = root.at("format"); format.string() != "gradclip.report") {
    format.fail("is " + quoted(format.string()), "'gradclip.report'", "--report FILE.json of any command writes one");
  }
  const JsonField version = root.at("version");
  if (version.integer(1, std::numeric_limits<std::int64_t>::max()) != kReportVersion) {
    version.fail("is " + version.value().dump(), std::to_string(kReportVersion),
                 "read it with the gradclip that wrote it");
  }
  PageReport report;
  report.command = text(root.at("command"));
  read_sweep(root, report);
  // A sweep is about several, the facts of a machine about none.
  if (report.command == "doctor" || report.command == "synth") {
    root.at("command").fail("reports of " + report.command + " have no page", "a report of any other command");
  }
  if (report.steps.empty()) report.dump = read_dump(root.at("dump"));
  read_run(root, report);
  read_norm(root, report);
  read_clip(root, report);
  read_reference(root, report);
  each(root, "meshes", [&](const JsonField& field) { report.meshes.push_back(read_mesh(field)); });
  if (const std::optional<JsonField> other = root.find("other")) {
    report.other = read_dump(*other);
    report.rule = rule_text(root.at("rule"));
    if (const std::optional<JsonField> first = root.find("first_difference")) {
      report.first_difference = text(first->at("name"));
      report.first_index = index_or_nothing(*first, "index");
    }
    each(root, "notes", [&](const JsonField& field) {
      const auto side = [&](const char* key) {
        const std::string value = optional_scalar(field, key);
        return value.empty() ? std::string("not recorded") : value;
      };
      report.contents.emplace_back(text(field.at("what")), side("a") + " in A, " + side("b") + " in B");
    });
    each(root, "parameters", [&](const JsonField& field) {
      each(field, "worst", [&](const JsonField& element) {
        report.worst.push_back({report.differences.size(), index_or_nothing(element, "index"), element.at("a").number(),
                                element.at("b").number()});
      });
      report.differences.push_back(read_difference(field));
    });
  } else {
    read_parts(root, report);
    each(root, "parameters", [&](const JsonField& field) { report.parameters.push_back(read_parameter(field)); });
  }
  each(root, "findings", [&](const JsonField& field) { report.findings.push_back(read_finding(field)); });
  read_checked(root, report);
  if (const std::optional<JsonField> training = root.find("training")) {
    for (const char* key : {"state", "producer"}) report.contents.emplace_back(key, text(root, key));
    add_facts(*training, "training.", report.contents);
  }
  if (const std::optional<JsonField> labels = root.find("labels")) add_facts(*labels, "", report.contents);
  read_check(root, report);
  return report;
}

}  // namespace gradclip
