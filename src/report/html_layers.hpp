#pragma once
// A model's parameters put together for charts: by layer, by module, as a tree. Inside this room. Totals are the
// report's; what is formed here is sums of parameters for a picture, in float64.

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/report/html_data.hpp"

namespace gradclip {

/// Some parameters of one name, in model order. Parameters are indices.
struct Layer {
  std::string name;
  std::vector<std::size_t> parameters;
  std::size_t layers = 1;  ///< how many layers it stands for
};

/// The layer that a parameter belongs to: its name up to the first part that is a number ("model.layers.3"), or its
/// module where no part is ("model.embed_tokens"), or the name itself at the root.
[[nodiscard]] std::string_view layer_of(std::string_view parameter);

/// In the order of their first parameters. @param name_of  of the parameter at an index
[[nodiscard]] std::vector<Layer> layers_by(std::size_t parameters,
                                           const std::function<std::string_view(std::size_t)>& name_of);

/// At most `most` layers: neighbours together where there are more. @pre most >= 1
[[nodiscard]] std::vector<Layer> at_most(std::vector<Layer> layers, std::size_t most);

/// The last part of a name, which is a layer's number where it has one.
[[nodiscard]] std::string_view last_part(std::string_view name);

/// Statistics of some counted parameters together. Empty where nothing was measured.
struct LayerSum {
  std::size_t parameters = 0;
  double elements = 0.0;
  std::optional<double> norm;  ///< p-th powers added up
  std::optional<double> share;
  std::optional<double> rms;  ///< norm / sqrt(elements), for p = 2
  std::optional<double> max_abs;
  std::optional<double> min_abs;
  std::optional<double> mean;   ///< its magnitude
  std::optional<double> zeros;  ///< of all elements; so are the next two
  std::optional<double> subnormals;
  std::optional<double> nonfinite;
};
[[nodiscard]] LayerSum sum_of(const PageReport& report, std::span<const std::size_t> parameters);

/// A module with what is in it. Modules with a single child are one node with it.
struct ModuleNode {
  std::string label;  ///< the parts of the name that it adds
  std::string name;   ///< from the root
  std::vector<std::size_t> parameters;
  std::vector<ModuleNode> children;
};

/// The tree of names; a part beyond `depth` levels stays in its leaf's label.
[[nodiscard]] ModuleNode module_tree(const std::vector<PageParameter>& parameters, std::size_t depth);

}  // namespace gradclip
