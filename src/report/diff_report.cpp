#include <cmath>
#include <limits>

#include "gradclip/norm/shard_sums.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {
namespace {

std::optional<ReportExtreme> extreme(const ParameterDifference& parameter, double value, std::uint64_t at) {
  const Difference& found = parameter.found;
  if (found.nan_different != 0) {
    return ReportExtreme{std::numeric_limits<double>::quiet_NaN(), index_at(parameter.pair.shape, found.first_nan)};
  }
  if (at == kNowhere) return std::nullopt;
  return ReportExtreme{value, index_at(parameter.pair.shape, at)};
}

ReportDifference difference_of(const ParameterDifference& parameter) {
  const ComparedPair& pair = parameter.pair;
  const Difference& found = parameter.found;
  ReportDifference report;
  report.name = pair.name;
  if (!pair.mapped_name.empty()) report.name_in_other = pair.mapped_name;
  report.status = name(parameter.status);
  if (pair.a) report.dtype = pair.a->dtype;
  if (pair.b) report.dtype_in_other = pair.b->dtype;
  report.shape = parameter.compared() ? pair.shape : pair.a ? pair.a->shape : pair.b->shape;
  if (!parameter.compared()) return report;
  if (!parameter.rule.ulps) report.relative = parameter.rule.relative;
  report.elements = found.elements;
  report.different = found.different;
  report.nan_different = found.nan_different;
  report.none_different = found.none_different;
  report.max_abs = extreme(parameter, found.max_abs, found.max_abs_at);
  report.max_rel = extreme(parameter, found.max_rel, found.max_rel_at);
  report.relative_l2 = parameter.relative_l2();
  report.relative_l2_epsilons = report.relative_l2 / epsilon_of(parameter.rule.narrower);
  report.cosine = parameter.cosine();
  report.norm_ratio = parameter.norm_ratio();
  if (found.first_different != kNowhere) report.first_different = index_at(pair.shape, found.first_different);
  for (const WorstElement& element : parameter.worst) {
    report.worst.push_back({index_at(pair.shape, element.position), element.a, element.b});
  }
  return report;
}

bool is_same(const ReportValue& a, const ReportValue& b) {
  const auto* x = std::get_if<double>(&a);
  const auto* y = std::get_if<double>(&b);
  return a == b || (x != nullptr && y != nullptr && std::isnan(*x) && std::isnan(*y));
}

template <class Value>
ReportValue value_of(const std::optional<Value>& recorded) {
  return recorded ? ReportValue(*recorded) : ReportValue(nullptr);
}

/// What else the manifests say of the two steps that is not the same.
std::vector<ReportNote> notes_of(const Manifest& a, const Manifest& b) {
  std::vector<ReportNote> notes;
  const auto compare = [&](std::string what, ReportValue of_a, ReportValue of_b) {
    if (!is_same(of_a, of_b)) notes.push_back({std::move(what), std::move(of_a), std::move(of_b)});
  };
  compare("state", std::string(name(a.state)), std::string(name(b.state)));
  compare("step", value_of(a.step), value_of(b.step));
  compare("world_size", std::int64_t{a.world_size}, std::int64_t{b.world_size});
  const TrainingRecord &x = a.training, &y = b.training;
  compare("max_grad_norm", value_of(x.max_grad_norm), value_of(y.max_grad_norm));
  compare("norm_type", value_of(x.norm_type), value_of(y.norm_type));
  compare("pp_enabled", value_of(x.pp_enabled), value_of(y.pp_enabled));
  compare("pp_axis_name", value_of(x.pp_axis_name), value_of(y.pp_axis_name));
  compare("ep_axis_name", value_of(x.ep_axis_name), value_of(y.ep_axis_name));
  compare("num_label_tokens", value_of(x.num_label_tokens), value_of(y.num_label_tokens));
  compare("dp_group_size", value_of(x.dp_group_size), value_of(y.dp_group_size));
  compare("expert_tp_replication_factor", value_of(x.expert_tp_replication_factor),
          value_of(y.expert_tp_replication_factor));
  compare("foreach", value_of(x.foreach), value_of(y.foreach));
  compare("use_torch_clip_grad_norm", value_of(x.use_torch_clip_grad_norm), value_of(y.use_torch_clip_grad_norm));
  compare("ignore_index", value_of(x.ignore_index), value_of(y.ignore_index));
  compare("grad_norm", value_of(x.grad_norm), value_of(y.grad_norm));
  return notes;
}

}  // namespace

Report diff_report(const std::filesystem::path& a, const Manifest& manifest_a, const std::filesystem::path& b,
                   const Manifest& manifest_b, const DiffRule& rule, const DiffResult& result, ReportRun run) {
  Report report;
  report.command = "diff";
  report.dump = report_dump(a, manifest_a);
  report.run = std::move(run);
  ReportDiff& diff = report.diff.emplace();
  diff.other = report_dump(b, manifest_b);
  diff.notes = notes_of(manifest_a, manifest_b);
  std::error_code error;
  diff.same_path = std::filesystem::equivalent(a, b, error);
  diff.ulps = rule.ulps;
  if (!rule.ulps) {
    diff.relative = rule.relative;
    diff.absolute = rule.absolute;
  }
  diff.equal_nan = rule.equal_nan;
  for (const ParameterDifference& parameter : result.parameters) diff.parameters.push_back(difference_of(parameter));
  diff.first = result.first;
  report.findings = result.findings;
  return report;
}

}  // namespace gradclip
