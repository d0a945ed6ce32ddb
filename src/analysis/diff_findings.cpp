#include "gradclip/analysis/diff_findings.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "gradclip/base/error.hpp"
#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostMeanings = 3;

std::optional<std::int64_t> data_parallel_size(const Manifest& manifest) {
  if (manifest.training.dp_group_size) return manifest.training.dp_group_size;
  if (!manifest.device_mesh) return std::nullopt;
  const DeviceMesh& mesh = manifest.meshes[*manifest.device_mesh];
  std::int64_t size = 1;
  for (std::size_t d = 0; d < mesh.dimensions(); ++d) {
    if (mesh.dim_names()[d].starts_with("dp")) size *= mesh.shape()[d];
  }
  return size;
}

void add_known(std::vector<KnownNumber>& known, double value, std::string meaning) {
  if (!std::isfinite(value) || value <= 0.0 || value == 1.0) return;
  const bool there = std::any_of(known.begin(), known.end(), [&](const KnownNumber& other) {
    return other.value == value && other.meaning == meaning;
  });
  if (!there) known.push_back({value, std::move(meaning)});
}

void add_known_of(std::vector<KnownNumber>& known, const Manifest& manifest, const char* side) {
  const TrainingRecord& training = manifest.training;
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  if (training.num_label_tokens) {
    add_known(known, number(*training.num_label_tokens), fmt::format("the label tokens of {}", side));
    if (training.dp_group_size && *training.dp_group_size > 0) {
      add_known(known, number(*training.num_label_tokens) / number(*training.dp_group_size),
                fmt::format("the label tokens over the data-parallel size of {}", side));
    }
  }
  if (const auto size = data_parallel_size(manifest)) {
    add_known(known, number(*size), fmt::format("the data-parallel size of {}", side));
  }
  if (training.expert_tp_replication_factor) {
    add_known(known, number(*training.expert_tp_replication_factor),
              fmt::format("the expert replication factor of {}", side));
  }
  if (manifest.microbatch) {
    add_known(known, number(manifest.microbatch->count), fmt::format("the number of microbatches of {}", side));
  }
  add_known(known, manifest.world_size, fmt::format("the number of ranks of {}", side));
  for (const DeviceMesh& mesh : manifest.meshes) {
    for (std::size_t d = 0; d < mesh.dimensions(); ++d) {
      add_known(known, number(mesh.shape()[d]),
                fmt::format("the size of mesh dimension {} of {}", quoted(mesh.dim_names()[d]), side));
    }
  }
}

bool lies_in(double value, const ConstantRatio& ratio) {
  return ratio.low <= value && value <= ratio.high;
}

/// The ratio with what the roundings of both sides can move its ends by.
ConstantRatio widened(const ConstantRatio& ratio, double epsilon) {
  return {ratio.low - epsilon * std::abs(ratio.low), ratio.high + epsilon * std::abs(ratio.high), ratio.of_sums};
}

std::string ratio_text(double ratio) {
  const double whole = std::round(1.0 / ratio);
  if (std::abs(ratio) < 1.0 && std::abs(1.0 / whole - ratio) <= 1e-15 * std::abs(ratio)) {
    return whole < 0 ? fmt::format("-1/{}", -whole) : fmt::format("1/{}", whole);
  }
  return fmt::format("{:.10g}", ratio);
}

std::string meaning_text(double ratio, const std::vector<KnownNumber>& known) {
  std::vector<std::string> meanings;
  for (const KnownNumber& number : known) {
    if (meanings.size() == kMostMeanings) break;
    const double size = std::abs(ratio);
    const double apart = std::min(std::abs(size / number.value - 1.0), std::abs(size * number.value - 1.0));
    if (apart <= 1e-12) meanings.push_back(number.meaning);
  }
  if (meanings.empty()) return {};
  const double size = std::abs(ratio);
  return fmt::format(" ({:.10g} is {})", size < 1.0 ? 1.0 / size : size, fmt::join(meanings, ", or "));
}

bool has_values(const ParameterDifference& parameter) {
  return parameter.found.sums.aa > 0.0 || parameter.found.sums.bb > 0.0 || parameter.status != DiffStatus::equal;
}

bool looks_like_expert(const Manifest& manifest, const ParameterEntry& entry) {
  return manifest.is_expert(entry, manifest.training.ep_axis_name.value_or("")) ||
         entry.name.find("expert") != std::string::npos;
}

/// What the group's parameters have in common that no other has.
std::string group_text(const Manifest& a, const Manifest& b, const std::vector<ParameterDifference>& parameters,
                       const std::vector<std::size_t>& members) {
  const std::set<std::size_t> in(members.begin(), members.end());
  std::vector<std::size_t> all;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (parameters[p].compared() && has_values(parameters[p])) all.push_back(p);
  }
  const bool one = members.size() == 1;
  const std::string these = one ? "the one parameter" : fmt::format("the {} parameters", members.size());
  if (members.size() == all.size()) return one ? "in " + these : fmt::format("in all {} parameters", members.size());
  const auto are_exactly = [&](const auto& belongs) {
    return std::all_of(all.begin(), all.end(), [&](std::size_t p) { return belongs(p) == (in.count(p) != 0); });
  };
  const auto entry_a = [&](std::size_t p) -> const ParameterEntry& {
    return a.parameters[parameters[p].pair.a->parameter];
  };
  const auto entry_b = [&](std::size_t p) -> const ParameterEntry& {
    return b.parameters[parameters[p].pair.b->parameter];
  };
  if (are_exactly([&](std::size_t p) { return looks_like_expert(a, entry_a(p)); }))
    return one ? "in the one expert parameter and no other"
               : fmt::format("in all {} expert parameters and no other", members.size());
  if (are_exactly([&](std::size_t p) { return !looks_like_expert(a, entry_a(p)); }))
    return one ? "in the one parameter that is no expert"
               : fmt::format("in all {} parameters but the experts", members.size());
  for (const bool of_b : {false, true}) {
    const Manifest& manifest = of_b ? b : a;
    const auto entry = [&](std::size_t p) -> const ParameterEntry& { return of_b ? entry_b(p) : entry_a(p); };
    const ParameterEntry& first = entry(members.front());
    if (!are_exactly(
            [&](std::size_t p) { return entry(p).mesh == first.mesh && entry(p).layout() == first.layout(); })) {
      continue;
    }
    const char* side = of_b ? "B" : "A";
    if (!first.mesh)
      return fmt::format("in {} that {} in {}", these, one ? "is a plain tensor" : "are plain tensors", side);
    return fmt::format("in {} on mesh {} with {} in {}", these, quoted(manifest.meshes[*first.mesh].name()),
                       to_string(first.layout()), side);
  }
  return one ? "in one parameter"
             : fmt::format("in {} parameters, the first {}", members.size(),
                           quoted(parameters[members.front()].pair.name));
}

std::string count_text(const Difference& found) {
  std::string text = fmt::format("{} of {} elements differ", found.different, found.elements);
  if (found.none_different != 0) {
    text += found.none_different == found.elements ? ": the gradient is None on one side"
                                                   : fmt::format(", {} of them None on one side", found.none_different);
  }
  if (found.nan_different != 0) text += fmt::format(", {} of them NaN on one side or both", found.nan_different);
  if (found.max_abs > 0.0) {
    text += fmt::format("; by up to {:.6g}, relatively ", found.max_abs);
    text += std::isfinite(found.max_rel) ? fmt::format("{:.6g}", found.max_rel)
            : found.sums.bb == 0.0       ? "without bound: B is 0 everywhere"
                                         : "without bound: some are 0 in B";
  }
  return text;
}

Finding differs(const ParameterDifference& parameter) {
  const Difference& found = parameter.found;
  Finding finding{
      .kind = "differs", .parameter = parameter.pair.name, .ranks = {}, .index = {}, .value = {}, .message = {}};
  const std::uint64_t at = found.nan_different != 0 ? found.first_nan
                           : found.max_abs > 0.0    ? found.max_abs_at
                                                    : found.first_different;
  if (at != kNowhere) finding.index = index_at(parameter.pair.shape, at);
  if (found.nan_different != 0) {
    finding.value = std::nan("");
  } else if (found.max_abs > 0.0) {
    finding.value = found.max_abs;
  }
  finding.message = count_text(found);
  return finding;
}

/// "; 3 of 96 elements do not follow it, the furthest 'w' [0, 1]: 0.5 in A, 7 in B"
std::string leftover_text(const std::vector<ParameterDifference>& parameters, const RatioGroup& group) {
  std::uint64_t left = 0, elements = 0;
  const ParameterDifference* furthest = nullptr;
  for (const std::size_t p : group.parameters) {
    const ParameterDifference& parameter = parameters[p];
    elements += parameter.found.elements;
    left += parameter.leftover.elements;
    if (parameter.leftover.elements == 0) continue;
    if (furthest == nullptr || parameter.leftover.furthest > furthest->leftover.furthest) furthest = &parameter;
  }
  if (furthest == nullptr) return {};
  const RatioLeftover& leftover = furthest->leftover;
  const std::string where = fmt::format("[{}]", fmt::join(index_at(furthest->pair.shape, leftover.at), ", "));
  return fmt::format("; {} of {} elements {} not follow it, the furthest {}: {:.6g} in A, {:.6g} in B", left, elements,
                     left == 1 ? "does" : "do",
                     group.parameters.size() == 1 ? where : quoted(furthest->pair.name) + ' ' + where, leftover.a,
                     leftover.b);
}

std::string shape_text(const ComparedTensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape, ", "));
}

}  // namespace

std::vector<KnownNumber> known_numbers(const Manifest& a, const Manifest& b) {
  std::vector<KnownNumber> known;
  add_known_of(known, a, "A");
  add_known_of(known, b, "B");
  const auto quotient = [&](std::optional<std::int64_t> of_a, std::optional<std::int64_t> of_b, const char* what) {
    if (!of_a || !of_b || *of_a <= 0 || *of_b <= 0) return;
    add_known(known, static_cast<double>(*of_b) / static_cast<double>(*of_a),
              fmt::format("{} of one dump over that of the other", what));
  };
  quotient(a.training.num_label_tokens, b.training.num_label_tokens, "the label tokens");
  quotient(data_parallel_size(a), data_parallel_size(b), "the data-parallel size");
  quotient(a.world_size, b.world_size, "the number of ranks");
  return known;
}

std::optional<ConstantRatio> constant_ratio(const ParameterDifference& parameter) {
  const Difference& found = parameter.found;
  if (parameter.status != DiffStatus::differs || found.none_different != 0 || found.nan_different != 0 ||
      !std::isfinite(found.max_abs) || found.ratio_broken != 0) {
    return std::nullopt;
  }
  const double epsilon = epsilon_of(parameter.rule.narrower);
  const double least = std::max(4.0 * epsilon, parameter.rule.relative);  // away from 1
  const auto away_from_one = [&](double ratio) { return std::abs(ratio - 1.0) > least && std::isfinite(ratio); };
  const double middle = found.ratio_low + (found.ratio_high - found.ratio_low) / 2;
  if (found.ratio_low <= found.ratio_high && found.ratio_low * found.ratio_high > 0.0 &&
      found.ratio_high - found.ratio_low <= 2.0 * epsilon * std::abs(middle)) {
    if (!away_from_one(middle)) return std::nullopt;
    return ConstantRatio{found.ratio_low, found.ratio_high, /*of_sums=*/false};
  }
  const PairSums& sums = found.sums;
  if (!(sums.aa > 0.0 && sums.bb > 0.0)) return std::nullopt;
  const double ratio = sums.ab / sums.aa;
  const double cosine = sums.ab / (std::sqrt(sums.aa) * std::sqrt(sums.bb));
  // The part of B that is no multiple of A. Sums of squares tell it to about 1e-7 only.
  const double apart = std::sqrt(std::max(0.0, 1.0 - cosine * cosine));
  const double limit = 8.0 * epsilon;
  if (limit < 1e-7 || limit > kMostUnexplained || apart > limit || !away_from_one(ratio)) return std::nullopt;
  const double slack = limit * std::abs(ratio);
  return ConstantRatio{ratio - slack, ratio + slack, /*of_sums=*/true};
}

double likely_number(const ConstantRatio& ratio, const std::vector<KnownNumber>& known) {
  const double middle = ratio.low + (ratio.high - ratio.low) / 2;
  std::optional<double> best;
  const auto consider = [&](double value) {
    if (lies_in(value, ratio) && (!best || std::abs(value - middle) < std::abs(*best - middle))) best = value;
  };
  for (const double sign : {1.0, -1.0}) {
    for (const KnownNumber& number : known) {
      consider(sign * number.value);
      consider(sign / number.value);
    }
  }
  if (best) return *best;
  consider(std::round(middle));
  if (middle != 0.0) consider(1.0 / std::round(1.0 / middle));
  if (best) return *best;
  if (middle > 0.0) consider(std::exp2(std::round(std::log2(middle))));
  return best.value_or(middle);
}

std::vector<RatioGroup> ratio_groups(const std::vector<ParameterDifference>& parameters,
                                     const std::vector<KnownNumber>& known) {
  std::vector<RatioGroup> groups;
  for (const bool single : {false, true}) {
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      if (!parameters[p].ratio || (parameters[p].found.elements == 1) != single) continue;
      const ConstantRatio ratio = widened(*parameters[p].ratio, epsilon_of(parameters[p].rule.narrower));
      const auto place = std::find_if(groups.begin(), groups.end(), [&](const RatioGroup& group) {
        return group.ratio.low <= ratio.high && ratio.low <= group.ratio.high;
      });
      if (place != groups.end()) {
        place->ratio.low = std::max(place->ratio.low, ratio.low);
        place->ratio.high = std::min(place->ratio.high, ratio.high);
        place->parameters.push_back(p);
      } else if (!single) {
        groups.push_back({ratio, {p}, 0.0});
      }
    }
  }
  for (RatioGroup& group : groups) {
    std::sort(group.parameters.begin(), group.parameters.end());
    group.number = likely_number(group.ratio, known);
  }
  return groups;
}

std::vector<Finding> diff_findings(const Manifest& a, const Manifest& b,
                                   const std::vector<ParameterDifference>& parameters,
                                   const std::vector<RatioGroup>& groups, const std::vector<KnownNumber>& known) {
  std::vector<Finding> findings;
  const bool any = std::any_of(parameters.begin(), parameters.end(),
                               [](const ParameterDifference& parameter) { return parameter.compared(); });
  if (!any) {
    findings.push_back({.kind = "nothing-seen",
                        .parameter = {},
                        .ranks = {},
                        .index = {},
                        .value = {},
                        .message = "no parameter was compared: no name is in both dumps"});
  }
  std::set<std::size_t> explained;
  for (const RatioGroup& group : groups) {
    explained.insert(group.parameters.begin(), group.parameters.end());
    const double ratio = group.number;
    Finding finding{.kind = "constant-ratio", .parameter = {}, .ranks = {}, .index = {}, .value = ratio, .message = {}};
    if (group.parameters.size() == 1) finding.parameter = parameters[group.parameters.front()].pair.name;
    finding.message = fmt::format("constant ratio {}: B = {} x A {}{}", ratio_text(ratio), ratio_text(ratio),
                                  group_text(a, b, parameters, group.parameters), meaning_text(ratio, known));
    finding.message += leftover_text(parameters, group);
    findings.push_back(std::move(finding));
  }
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const ParameterDifference& parameter = parameters[p];
    const ComparedPair& pair = parameter.pair;
    const auto add = [&](const char* kind, std::string message) {
      findings.push_back(
          {.kind = kind, .parameter = pair.name, .ranks = {}, .index = {}, .value = {}, .message = std::move(message)});
    };
    switch (pair.status) {
      case PairStatus::missing:
        add("missing",
            pair.mapped_name.empty() ? "A has it and B does not" : "A has it and B has no " + quoted(pair.mapped_name));
        break;
      case PairStatus::extra:
        add("extra", "B has it and A does not");
        break;
      case PairStatus::shapes_differ:
        add("shape", fmt::format("the shape is {} in A and {} in B", shape_text(*pair.a), shape_text(*pair.b)));
        break;
      case PairStatus::both:
        if (parameter.status == DiffStatus::differs && explained.count(p) == 0) findings.push_back(differs(parameter));
        break;
    }
  }
  return findings;
}

}  // namespace gradclip
