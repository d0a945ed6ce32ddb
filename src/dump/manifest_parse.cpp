#include <fmt/format.h>

#include <limits>
#include <set>
#include <string>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/dump/manifest_parameters.hpp"

namespace gradclip {
namespace {

constexpr std::int64_t kAnyInteger = std::numeric_limits<std::int64_t>::max();
constexpr std::string_view kChecksum = "checksum";

class ManifestParser {
 public:
  /// @param problems  null: the first one is thrown. Else they are collected there as far as one does not follow from
  ///                  another, and the manifest is what is left without them.
  ManifestParser(const std::string& where, std::vector<ErrorText>* problems)
      : where_(where), problems_(problems), parameters_(manifest_, where_, problems) {}

  Manifest parse(const std::string& text) {
    const JsonStream stream{"parameters", [this](const std::string&, std::size_t index, nlohmann::json&& value) {
                              parameters_.take(index, value);
                            }};
    manifest_.text_checksum = xxh3_64(text.data(), text.size());
    const JsonDocument document = parse_json(text, where_, &stream);
    const JsonField root(document.root, where_, "");
    check_format(root);
    parameters_.rethrow();
    attempt([&] { check_checksum(root, document.checksum); });
    usable_ = parse_job(root);
    parse_moment(root);
    if (manifest_.world_size > 0) {
      const bool meshes = parse_meshes(root);
      const bool parameters = attempt([&] {
        if (!root.at("parameters").value().is_array()) root.at("parameters").fail("a list");
        parameters_.finish(mesh_indices_, refused_meshes_);
      });
      complete_ = meshes && parameters && manifest_.refused.empty();
    }
    if (const auto training = root.find("training")) complete_ = parse_training(*training) && complete_;
    if (const auto files = root.find("files")) parse_files(*files);
    return std::move(manifest_);
  }

  /// Whether the manifest says which rank files there are. After parse().
  [[nodiscard]] bool usable() const noexcept { return usable_; }
  /// Whether every mesh, parameter and training number is in it. After parse().
  [[nodiscard]] bool complete() const noexcept { return complete_; }

 private:
  /// Whether there was no problem.
  template <class Function>
  bool attempt(const Function& function) {
    try {
      function();
      return true;
    } catch (const Error& error) {
      if (problems_ == nullptr) throw;
      problems_->push_back(error.text());
      return false;
    }
  }

  // ---- the head of the document

  static void check_format(const JsonField& root) {
    const JsonField format = root.at("format");
    if (format.string() != "gradclip.dump") format.fail("\"gradclip.dump\"");
    const JsonField version = root.at("version");
    if (version.integer(1, kAnyInteger) != 1) {
      version.fail(fmt::format("is version {}", version.value().dump()), "version 1", "use a newer gradclip");
    }
  }

  void check_checksum(const JsonField& root, std::uint64_t actual) {
    const auto recorded = root.find("checksum");
    if (!recorded) return;
    const auto value = parse_checksum(recorded->string());
    if (!value) recorded->fail("16 hexadecimal digits");
    manifest_.has_checksum = true;
    if (*value == actual) return;
    throw Error(ExitCode::bad_input,
                {.where = recorded->where(),
                 .found = "the content of the manifest has the checksum " + checksum_text(actual),
                 .expected = checksum_text(*value) + " (what the manifest says of itself)",
                 .advice = "the manifest was changed or damaged after it was written; if you changed it on purpose, "
                           "remove its key \"checksum\"",
                 .kind = kChecksum});
  }

  bool parse_job(const JsonField& root) {
    const bool size = attempt(
        [&] { manifest_.world_size = static_cast<std::int32_t>(root.at("world_size").integer(1, kMaxWorldSize)); });
    return attempt([&] { manifest_.rank_file_pattern = checked_pattern(root.at("rank_file")); }) && size;
  }

  void parse_moment(const JsonField& root) {
    attempt([&] {
      if (const auto step = root.find("step")) manifest_.step = step->integer(-kAnyInteger, kAnyInteger);
    });
    attempt([&] {
      if (const auto microbatch = root.find("microbatch")) manifest_.microbatch = parse_microbatch(*microbatch);
    });
    attempt([&] {
      if (const auto accumulation = root.find("accumulation")) {
        manifest_.accumulation = parse_accumulation(*accumulation);
      }
    });
    attempt([&] {
      if (const auto state = root.find("state")) manifest_.state = parse_state(*state);
    });
    attempt([&] {
      manifest_.merged = root.find("merge").has_value();
      if (const auto producer = root.find("producer")) manifest_.producer = describe_producer(*producer);
    });
  }

  static MicrobatchRecord parse_microbatch(const JsonField& field) {
    MicrobatchRecord microbatch;
    const auto flag = [&](const char* key) {
      const auto found = field.find(key);
      return found ? std::optional(found->boolean()) : std::nullopt;
    };
    microbatch.count = field.at("count").integer(1, kAnyInteger);
    microbatch.index = field.at("index").integer(0, microbatch.count - 1);
    microbatch.first_microbatch = flag("first_microbatch");
    microbatch.optimizer_step = flag("optimizer_step");
    microbatch.synchronised = flag("synchronised");
    if (const auto step = field.find("schedule_step")) microbatch.schedule_step = step->integer(0, kAnyInteger);
    return microbatch;
  }

  static AccumulationRecord parse_accumulation(const JsonField& field) {
    AccumulationRecord accumulation;
    static_cast<void>(field.object());
    if (const auto sync = field.find("sync")) {
      accumulation.sync = parse_synchronisation(sync->string());
      if (!accumulation.sync) sync->fail("\"deferred\", \"every\" or \"schedule\"");
    }
    accumulation.compute_dtype = parse_sum_type(field, "compute_dtype");
    accumulation.reduce_dtype = parse_sum_type(field, "reduce_dtype");
    accumulation.storage_dtype = parse_sum_type(field, "storage_dtype");
    return accumulation;
  }

  static std::string checked_pattern(const JsonField& field) {
    const std::string& pattern = field.name();
    const auto refuse = [&] {
      field.fail("a file name with exactly one {rank} or {rank:0Nd} and no directory separator");
    };
    const std::size_t open = pattern.find('{');
    const std::size_t close = pattern.find('}');
    if (open == std::string::npos || close == std::string::npos || close < open) refuse();
    if (pattern.find('{', open + 1) != std::string::npos || pattern.find('}', close + 1) != std::string::npos) refuse();
    if (pattern.find('/') != std::string::npos || pattern.size() > 200) refuse();
    const std::string inside = pattern.substr(open + 1, close - open - 1);
    if (inside == "rank") return pattern;
    const bool padded = inside.starts_with("rank:0") && inside.ends_with("d") && inside.size() >= 8 &&
                        inside.size() <= 9 && inside.find_first_not_of("0123456789", 6) == inside.size() - 1;
    const int width = padded ? std::stoi(inside.substr(6)) : 0;
    if (!padded || width < 1 || width > 20) refuse();
    return pattern;
  }

  static GradientState parse_state(const JsonField& field) {
    for (const auto state : {GradientState::before_scale, GradientState::before_clip, GradientState::after_clip}) {
      if (field.string() == name(state)) return state;
    }
    field.fail("\"before_scale\", \"before_clip\" or \"after_clip\"");
  }

  static std::string describe_producer(const JsonField& field) {
    if (field.value().is_string()) return printable(field.string());
    const auto part = [&](const char* key) {
      const auto found = field.find(key);
      return found ? printable(found->string()) : std::string();
    };
    std::string text = part("name");
    if (const std::string version = part("version"); !version.empty()) text += (text.empty() ? "" : " ") + version;
    if (const std::string framework = part("framework"); !framework.empty()) text += " (" + framework + ")";
    return text;
  }

  // ---- meshes

  bool parse_meshes(const JsonField& root) {
    bool all = attempt([&] {
      if (const auto meshes = root.find("meshes")) {
        for (const auto& [key, value] : meshes->object().items()) {
          const bool good = attempt([&] { parse_mesh(key, meshes->member(key, value)); });
          if (!good) refused_meshes_.insert(key);
        }
      }
    });
    all = attempt([&] {
            if (const auto device_mesh = root.find("device_mesh")) manifest_.device_mesh = mesh_index(*device_mesh);
          }) &&
          all;
    all = attempt([&] {
            if (const auto moe = root.find("moe_mesh")) parse_moe_meshes(*moe);
          }) &&
          all;
    return all && refused_meshes_.empty();
  }

  void parse_moe_meshes(const JsonField& field) {
    const auto add = [&](const JsonField& mesh) {
      if (const auto index = mesh_index(mesh)) manifest_.moe_meshes.push_back(*index);
    };
    if (field.value().is_string()) return add(field);
    if (!field.value().is_array()) field.fail("null, the name of a mesh or a list of names");
    for (std::size_t i = 0; i < field.value().size(); ++i) add(field.element(i));
  }

  void parse_mesh(const std::string& key, const JsonField& field) {
    if (key.empty() || key.size() > kMaxNameBytes) field.fail("a mesh with a name of 1 to 4096 bytes");
    const JsonField dim_names = field.at("dim_names");
    std::vector<std::string> names;
    for (std::size_t i = 0; i < dim_names.array().size(); ++i) names.push_back(dim_names.element(i).name());
    std::vector<std::int64_t> shape;
    std::vector<std::int32_t> ranks;
    const JsonField array = field.at("ranks");
    static_cast<void>(array.array());
    measure(array, shape);
    flatten(array, shape, 0, ranks);
    mesh_indices_.emplace(key, manifest_.meshes.size());
    located(field, [&] { manifest_.meshes.emplace_back(key, std::move(names), std::move(shape), std::move(ranks)); });
  }

  static void measure(const JsonField& field, std::vector<std::int64_t>& shape) {
    for (const nlohmann::json* level = &field.value(); level->is_array(); level = &level->front()) {
      if (level->empty()) field.fail("has an empty dimension", "at least one rank in each dimension");
      shape.push_back(static_cast<std::int64_t>(level->size()));
    }
  }

  void flatten(const JsonField& field, const std::vector<std::int64_t>& shape, std::size_t depth,
               std::vector<std::int32_t>& ranks) const {
    if (depth == shape.size()) {
      ranks.push_back(rank(field));
      return;
    }
    if (!field.value().is_array() || static_cast<std::int64_t>(field.value().size()) != shape[depth]) {
      field.fail(fmt::format("a list of {} elements, as its neighbours", shape[depth]));
    }
    for (std::size_t i = 0; i < field.value().size(); ++i) flatten(field.element(i), shape, depth + 1, ranks);
  }

  std::int32_t rank(const JsonField& field) const {
    const std::int64_t value = field.integer(0, kAnyInteger);
    if (value >= manifest_.world_size) {
      field.fail(fmt::format("is rank {}", value),
                 fmt::format("a rank below the world size of {}", manifest_.world_size));
    }
    return static_cast<std::int32_t>(value);
  }

  /// Empty for a mesh that is wrong itself.
  std::optional<std::size_t> mesh_index(const JsonField& field) const {
    if (refused_meshes_.count(field.string()) != 0) return std::nullopt;
    return gradclip::mesh_index(manifest_, mesh_indices_, field.string(), field);
  }

  // ---- training and files

  bool parse_training(const JsonField& field) {
    TrainingRecord& training = manifest_.training;
    if (!attempt([&] { static_cast<void>(field.object()); })) return false;
    bool all = true;
    const auto take = [&](const char* key, auto& to, const auto& value_of) {
      all = attempt([&] {
              if (const auto found = field.find(key)) to = value_of(*found);
            }) &&
            all;
    };
    const auto number = [&](const char* key, std::optional<double>& to) {
      take(key, to, [](const JsonField& found) { return found.number(); });
    };
    const auto integer = [&](const char* key, std::optional<std::int64_t>& to) {
      take(key, to, [](const JsonField& found) { return found.integer(-kAnyInteger, kAnyInteger); });
    };
    const auto boolean = [&](const char* key, std::optional<bool>& to) {
      take(key, to, [](const JsonField& found) { return found.boolean(); });
    };
    const auto text = [&](const char* key, std::optional<std::string>& to) {
      take(key, to, [](const JsonField& found) { return found.name(); });
    };
    number("max_grad_norm", training.max_grad_norm);
    number("norm_type", training.norm_type);
    boolean("pp_enabled", training.pp_enabled);
    text("pp_axis_name", training.pp_axis_name);
    text("ep_axis_name", training.ep_axis_name);
    integer("num_label_tokens", training.num_label_tokens);
    integer("dp_group_size", training.dp_group_size);
    // The reference takes no 2.0 for it.
    const auto factor = field.find("expert_tp_replication_factor");
    if (factor && !factor->value().is_number_integer()) factor->fail("an integer of at least 1");
    integer("expert_tp_replication_factor", training.expert_tp_replication_factor);
    boolean("foreach", training.foreach);
    boolean("use_torch_clip_grad_norm", training.use_torch_clip_grad_norm);
    integer("ignore_index", training.ignore_index);
    number("grad_norm", training.grad_norm);
    return all;
  }

  void parse_files(const JsonField& field) {
    if (!attempt([&] { static_cast<void>(field.object()); })) return;
    for (const auto& [key, value] : field.value().items()) {
      const JsonField file = field.member(key, value);
      attempt([&] { manifest_.files.emplace(key, file_record(file)); });
    }
  }

  static FileRecord file_record(const JsonField& file) {
    FileRecord record;
    record.bytes = static_cast<std::uint64_t>(file.at("bytes").integer(0, kAnyInteger));
    if (const auto checksum = file.find("xxh3_64")) {
      record.xxh3_64 = parse_checksum(checksum->string());
      if (!record.xxh3_64) checksum->fail("16 hexadecimal digits");
    }
    return record;
  }

  const std::string& where_;
  std::vector<ErrorText>* problems_;
  Manifest manifest_;
  ParameterParser parameters_;
  MeshIndices mesh_indices_;
  std::set<std::string> refused_meshes_;
  bool usable_ = false;
  bool complete_ = false;
};

}  // namespace

Manifest parse_manifest(const std::string& text, const std::string& where) {
  return ManifestParser(where, nullptr).parse(text);
}

ManifestReading examine_manifest(const std::string& text, const std::string& where) {
  ManifestReading reading;
  try {
    ManifestParser parser(where, &reading.problems);
    Manifest manifest = parser.parse(text);
    if (parser.usable()) reading.manifest = std::move(manifest);
    reading.complete = parser.complete();
  } catch (const Error& error) {
    if (error.code() != ExitCode::bad_input) throw;
    reading.problems.push_back(error.text());
  }
  for (ErrorText& problem : reading.problems) {
    if (problem.kind.empty()) problem.kind = "manifest";
  }
  return reading;
}

}  // namespace gradclip
