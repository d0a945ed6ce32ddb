#pragma once
// What a model's parameters are: names, shapes, how parallelism cuts them. From a small description file.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradclip {

/// One line of a description. A name with {layer} stands for a parameter of each layer.
struct ModelParameter {
  enum class Stage : std::uint8_t { layers, first, last };

  std::string name;
  std::vector<std::int64_t> shape;
  std::optional<std::int64_t> tp;  ///< dimension that tensor parallelism cuts; empty: it holds copies
  bool expert = false;             ///< all experts as one tensor, its first dimension the expert
  Stage stage = Stage::layers;     ///< of the pipeline, where the name has no {layer}
  std::int64_t first_layer = 0;    ///< layers [first_layer, last_layer) have one
  std::optional<std::int64_t> last_layer;
};

struct ModelDescription {
  std::string name;
  std::int64_t layers = 0;
  std::vector<ModelParameter> parameters;
};

struct BuiltinModel {
  std::string name;
  std::string text;  ///< JSON
};
[[nodiscard]] const std::vector<BuiltinModel>& builtin_models();

/// A built-in model by its name, or a description file.
/// Errors: Error(usage) for a name that is neither; Error(bad_input) for what is wrong with a file, with its path in
/// the document.
[[nodiscard]] ModelDescription read_model(const std::string& name_or_file);

/// @param where  begins every message
[[nodiscard]] ModelDescription parse_model(const std::string& text, const std::string& where);

}  // namespace gradclip
