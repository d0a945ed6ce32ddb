#include "gradclip/synth/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/text_file.hpp"

namespace gradclip {
namespace {

constexpr std::int64_t kMostLayers = 100'000;
constexpr std::int64_t kMostExtent = std::int64_t{1} << 40;
constexpr std::size_t kMostDimensions = 8;
constexpr std::uint64_t kMostElements = std::uint64_t{1} << 48;

ModelParameter parse_parameter(const JsonField& field) {
  ModelParameter parameter;
  parameter.name = field.at("name").name();
  const JsonField shape = field.at("shape");
  if (shape.array().size() > kMostDimensions) shape.fail(fmt::format("a list of at most {} sizes", kMostDimensions));
  std::uint64_t elements = 1;
  for (std::size_t d = 0; d < shape.array().size(); ++d) {
    parameter.shape.push_back(shape.element(d).integer(1, kMostExtent));
    if (__builtin_mul_overflow(elements, static_cast<std::uint64_t>(parameter.shape.back()), &elements) ||
        elements > kMostElements) {
      shape.fail("fewer than 2^48 elements");
    }
  }
  if (const auto tp = field.find("tp")) {
    parameter.tp = tp->integer(0, static_cast<std::int64_t>(parameter.shape.size()) - 1);
  }
  if (const auto expert = field.find("expert")) parameter.expert = expert->boolean();
  if (const auto stage = field.find("stage")) {
    const std::string& text = stage->string();
    if (text != "first" && text != "last") stage->fail("\"first\" or \"last\"");
    parameter.stage = text == "first" ? ModelParameter::Stage::first : ModelParameter::Stage::last;
  }
  const bool in_layers = parameter.name.find("{layer}") != std::string::npos;
  if (in_layers != (parameter.stage == ModelParameter::Stage::layers)) {
    field.fail("either {layer} in its name or a \"stage\"");
  }
  if (const auto layers = field.find("layers")) {
    if (layers->array().size() != 2) layers->fail("[first, end], end may be null");
    parameter.first_layer = layers->element(0).integer(0, kMostLayers);
    if (!layers->element(1).value().is_null()) parameter.last_layer = layers->element(1).integer(0, kMostLayers);
  }
  return parameter;
}

}  // namespace

ModelDescription parse_model(const std::string& text, const std::string& where) {
  const JsonDocument document = parse_json(text, where);
  const JsonField root(document.root, where, "");
  if (root.at("format").string() != "gradclip.model") root.at("format").fail("\"gradclip.model\"");
  static_cast<void>(root.at("version").integer(1, 1));
  ModelDescription model;
  model.name = root.at("name").name();
  model.layers = root.at("layers").integer(1, kMostLayers);
  const JsonField parameters = root.at("parameters");
  if (parameters.array().empty()) parameters.fail("at least one parameter");
  std::set<std::string> names;
  for (std::size_t i = 0; i < parameters.array().size(); ++i) {
    model.parameters.push_back(parse_parameter(parameters.element(i)));
    if (!names.insert(model.parameters.back().name).second) parameters.element(i).fail("a name of its own");
  }
  return model;
}

ModelDescription read_model(const std::string& name_or_file) {
  std::string names;
  for (const BuiltinModel& model : builtin_models()) {
    if (model.name == name_or_file) return parse_model(model.text, "model " + model.name);
    names += (names.empty() ? "" : ", ") + model.name;
  }
  std::error_code error;
  if (!std::filesystem::exists(name_or_file, error)) {
    throw Error(ExitCode::usage, {.where = "--model",
                                  .found = quoted(name_or_file),
                                  .expected = "one of " + names + ", or a description file",
                                  .advice = {}});
  }
  return parse_model(read_text_file(name_or_file, name_or_file, ExitCode::bad_input), name_or_file);
}

}  // namespace gradclip
