#include "gradclip/analysis/diff.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gradclip/analysis/block_comparison.hpp"
#include "gradclip/analysis/diff_findings.hpp"
#include "gradclip/analysis/diverged_copies.hpp"
#include "gradclip/analysis/only_names.hpp"
#include "gradclip/analysis/ratio_leftover.hpp"

namespace gradclip {
namespace {

DiffStatus status_of(const ParameterDifference& parameter) {
  switch (parameter.pair.status) {
    case PairStatus::missing:
      return DiffStatus::missing;
    case PairStatus::extra:
      return DiffStatus::extra;
    case PairStatus::shapes_differ:
      return DiffStatus::differs;
    case PairStatus::both:
      break;
  }
  return parameter.found.different == 0 ? DiffStatus::equal : DiffStatus::differs;
}

}  // namespace

std::string_view name(DiffStatus status) noexcept {
  switch (status) {
    case DiffStatus::equal:
      return "equal";
    case DiffStatus::differs:
      return "differs";
    case DiffStatus::missing:
      return "missing";
    case DiffStatus::extra:
      return "extra";
  }
  return "";
}

double ParameterDifference::relative_l2() const noexcept {
  if (found.sums.dd == 0.0) return 0.0;
  return found.sums.bb == 0.0 ? std::numeric_limits<double>::infinity() : std::sqrt(found.sums.dd / found.sums.bb);
}

std::optional<double> ParameterDifference::cosine() const noexcept {
  const PairSums& sums = found.sums;
  if (sums.aa == 0.0 || sums.bb == 0.0) return std::nullopt;
  if (sums.dd == 0.0) return 1.0;
  return std::clamp(sums.ab / (std::sqrt(sums.aa) * std::sqrt(sums.bb)), -1.0, 1.0);
}

std::optional<double> ParameterDifference::norm_ratio() const noexcept {
  if (found.sums.bb == 0.0) return std::nullopt;
  return std::sqrt(found.sums.aa / found.sums.bb);
}

std::size_t DiffResult::count(DiffStatus status) const noexcept {
  return static_cast<std::size_t>(
      std::count_if(parameters.begin(), parameters.end(),
                    [status](const ParameterDifference& parameter) { return parameter.status == status; }));
}

DiffResult compare_dumps(DiffRun& run, const DiffOptions& options) {
  const Manifest& a = run.dumps[0]->manifest();
  const Manifest& b = run.dumps[1]->manifest();
  const std::vector<ComparedPair> pairs = compared_pairs(a, b, options.names, options.only ? &*options.only : nullptr);
  if (options.only && pairs.empty()) refuse_unmatched_only();
  DiffResult result;
  for (const ComparedPair& pair : pairs) {
    ParameterDifference& parameter = result.parameters.emplace_back();
    parameter.pair = pair;
    parameter.rule =
        element_rule(options.rule, pair.a ? pair.a->dtype : pair.b->dtype, pair.b ? pair.b->dtype : pair.a->dtype);
  }
  const std::set<std::size_t> suspects = compare_blocks(run, pairs, options.max_elements, result.parameters);
  const std::vector<Finding> copies = compare_copies(run, pairs, suspects, options.max_elements, result.parameters);
  for (std::size_t p = 0; p < result.parameters.size(); ++p) {
    ParameterDifference& parameter = result.parameters[p];
    sort_worst(parameter.worst, options.max_elements);
    parameter.status = status_of(parameter);
    parameter.ratio = constant_ratio(parameter);
    if (!result.first && parameter.status != DiffStatus::equal) result.first = p;
  }
  const std::vector<KnownNumber> known = known_numbers(a, b);
  const std::vector<RatioGroup> groups = ratio_groups(result.parameters, known);
  measure_leftovers(run, pairs, suspects, groups, result.parameters);
  for (DumpReader* dump : run.dumps) dump->require_unchanged();
  result.findings = diff_findings(a, b, result.parameters, groups, known);
  result.findings.insert(result.findings.end(), copies.begin(), copies.end());
  return result;
}

}  // namespace gradclip
