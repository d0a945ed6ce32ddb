#include "gradclip/report/html_layers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "gradclip/report/names.hpp"

namespace gradclip {
namespace {

bool is_number(std::string_view part) {
  return !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
}

/// (sum of n^p)^(1/p), divided by the largest first so that no power overflows.
double p_norm(std::span<const double> norms, double p) {
  double largest = 0.0;
  for (const double norm : norms) {
    if (std::isnan(norm)) return norm;
    largest = std::max(largest, norm);
  }
  if (largest == 0.0 || std::isinf(largest) || std::isinf(p)) return largest;
  double sum = 0.0;
  for (const double norm : norms) sum += std::pow(norm / largest, p);
  return largest * std::pow(sum, 1.0 / p);
}

ModuleNode node_of(const std::vector<PageParameter>& parameters, std::vector<std::size_t> members, std::size_t begin,
                   std::size_t depth, std::string label, std::string name) {
  ModuleNode node{std::move(label), std::move(name), std::move(members), {}};
  if (depth == 0) return node;
  std::vector<std::string> labels;
  std::vector<std::vector<std::size_t>> children;
  std::unordered_map<std::string, std::size_t> known;
  for (const std::size_t p : node.parameters) {
    const std::string_view full = parameters[p].name;
    if (begin >= full.size()) continue;
    const std::size_t end = depth == 1 ? full.size() : std::min(full.find('.', begin), full.size());
    const std::string part(full.substr(begin, end - begin));
    const auto [place, is_new] = known.emplace(part, labels.size());
    if (is_new) {
      labels.push_back(part);
      children.emplace_back();
    }
    children[place->second].push_back(p);
  }
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const std::size_t end = begin + labels[i].size();
    std::string child_name = parameters[children[i].front()].name.substr(0, end);
    node.children.push_back(
        node_of(parameters, std::move(children[i]), end + 1, depth - 1, labels[i], std::move(child_name)));
  }
  if (node.children.size() == 1 && !node.name.empty()) {
    ModuleNode only = std::move(node.children.front());
    only.label = node.label + '.' + only.label;
    return only;
  }
  return node;
}

}  // namespace

std::string_view layer_of(std::string_view parameter) {
  for (std::size_t begin = 0; begin < parameter.size();) {
    const std::size_t end = std::min(parameter.find('.', begin), parameter.size());
    if (end == parameter.size()) break;  // the last part is the parameter's own
    if (is_number(parameter.substr(begin, end - begin))) return parameter.substr(0, end);
    begin = end + 1;
  }
  const std::string_view module = module_of(parameter, std::nullopt);
  return module.empty() ? parameter : module;
}

std::vector<Layer> layers_by(std::size_t parameters, const std::function<std::string_view(std::size_t)>& name_of) {
  std::vector<Layer> layers;
  std::unordered_map<std::string, std::size_t> known;
  for (std::size_t p = 0; p < parameters; ++p) {
    const std::string name(name_of(p));
    const auto [place, is_new] = known.emplace(name, layers.size());
    if (is_new) layers.push_back({name, {}, 1});
    layers[place->second].parameters.push_back(p);
  }
  return layers;
}

std::vector<Layer> at_most(std::vector<Layer> layers, std::size_t most) {
  if (layers.size() <= most) return layers;
  const std::size_t together = (layers.size() + most - 1) / most;
  std::vector<Layer> result;
  for (std::size_t begin = 0; begin < layers.size(); begin += together) {
    const std::size_t end = std::min(begin + together, layers.size());
    Layer merged = std::move(layers[begin]);
    merged.layers = end - begin;
    if (end - begin > 1) merged.name += " to " + layers[end - 1].name;
    for (std::size_t i = begin + 1; i < end; ++i) {
      merged.parameters.insert(merged.parameters.end(), layers[i].parameters.begin(), layers[i].parameters.end());
    }
    result.push_back(std::move(merged));
  }
  return result;
}

std::string_view last_part(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

LayerSum sum_of(const PageReport& report, std::span<const std::size_t> parameters) {
  LayerSum sum;
  std::vector<double> norms;
  double share = 0.0, mean = 0.0, zeros = 0.0, subnormals = 0.0, nonfinite = 0.0;
  bool has_share = false;
  for (const std::size_t p : parameters) {
    const PageParameter& parameter = report.parameters[p];
    if (!parameter.counted) continue;
    const auto elements = static_cast<double>(parameter.elements);
    ++sum.parameters;
    sum.elements += elements;
    if (parameter.share) {
      share += *parameter.share;
      has_share = true;
    }
    if (!parameter.norm) continue;
    norms.push_back(*parameter.norm);
    if (parameter.max_abs) sum.max_abs = std::max(sum.max_abs.value_or(0.0), *parameter.max_abs);
    if (parameter.min_abs) sum.min_abs = std::min(sum.min_abs.value_or(*parameter.min_abs), *parameter.min_abs);
    if (parameter.mean && std::isfinite(*parameter.mean)) mean += *parameter.mean * elements;
    zeros += static_cast<double>(parameter.zeros.value_or(0));
    subnormals += static_cast<double>(parameter.subnormals.value_or(0));
    nonfinite += static_cast<double>(parameter.nonfinite());
  }
  if (has_share) sum.share = share;
  if (norms.empty()) return sum;
  const double p = report.norm_type.value_or(2.0);
  sum.norm = p_norm(norms, p);
  if (sum.elements == 0.0) return sum;
  if (p == 2.0) sum.rms = *sum.norm / std::sqrt(sum.elements);
  sum.mean = std::abs(mean) / sum.elements;
  sum.zeros = zeros / sum.elements;
  sum.subnormals = subnormals / sum.elements;
  sum.nonfinite = nonfinite / sum.elements;
  return sum;
}

ModuleNode module_tree(const std::vector<PageParameter>& parameters, std::size_t depth) {
  std::vector<std::size_t> all;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (parameters[p].counted) all.push_back(p);
  }
  return node_of(parameters, std::move(all), 0, depth, "all", "");
}

}  // namespace gradclip
