#include "gradclip/analysis/baseline_check.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

#include "gradclip/analysis/name_map.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/norm/findings.hpp"

namespace gradclip {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool same(double a, double b) noexcept {
  return a == b || (std::isnan(a) && std::isnan(b));
}

double deviation_of(double found, double expected) noexcept {
  if (same(found, expected)) return 0.0;
  if (!std::isfinite(found) || !std::isfinite(expected) || expected == 0.0) return kInfinity;
  return std::abs(found - expected) / std::abs(expected);
}

/// Tolerances of every name.
class Tolerances {
 public:
  Tolerances(const std::vector<ToleranceRule>& rules, const BaselineTolerance& own) : own_(own) {
    for (const ToleranceRule& rule : rules) {
      rules_.push_back({rule, NamePattern(rule.pattern, "baseline, tolerances"), false});
    }
  }

  [[nodiscard]] const BaselineTolerance& own() const noexcept { return own_; }

  BaselineTolerance of(const std::string& name) {
    for (Rule& rule : rules_) {
      if (!rule.pattern.matches(name)) continue;
      rule.used = true;
      return {rule.rule.relative.value_or(own_.relative), rule.rule.absolute.value_or(own_.absolute),
              rule.rule.zeros.value_or(own_.zeros)};
    }
    return own_;
  }

  [[nodiscard]] std::vector<std::string> unused() const {
    std::vector<std::string> patterns;
    for (const Rule& rule : rules_) {
      if (!rule.used) patterns.push_back(rule.rule.pattern);
    }
    return patterns;
  }

 private:
  struct Rule {
    ToleranceRule rule;
    NamePattern pattern;
    bool used;
  };
  BaselineTolerance own_;
  std::vector<Rule> rules_;
};

/// Fills the items of an entry. With `exact`, whatever is not the same has changed; else it has failed.
class Comparison {
 public:
  Comparison(CheckedEntry& entry, const BaselineTolerance& tolerance, bool exact)
      : entry_(entry), tolerance_(exact ? BaselineTolerance{0.0, 0.0, 0.0} : tolerance), exact_(exact) {}

  template <class Value>
  void equal(std::string_view what, const Value& expected, const Value& found) {
    entry_.items.push_back({what, status(expected == found), expected, found});
  }

  void count(std::string_view what, std::uint64_t expected, std::uint64_t found) { near(what, expected, found, 0.0); }

  void zeros(std::uint64_t expected, std::uint64_t found) {
    near("zeros", expected, found,
         tolerance_.zeros == 0.0 ? 0.0 : tolerance_.zeros * std::max(1.0, static_cast<double>(expected)));
  }

  void number(std::string_view what, double expected, double found) {
    const double relative = tolerance_.relative == 0.0 ? 0.0 : tolerance_.relative * std::abs(expected);
    // An infinite tolerance of 0 would be NaN.
    const double allowed = std::isinf(tolerance_.relative) ? kInfinity : tolerance_.absolute + relative;
    const bool both_finite = std::isfinite(expected) && std::isfinite(found);
    const bool passed = same(expected, found) || (both_finite && std::abs(found - expected) <= allowed);
    entry_.items.push_back({what, status(passed), expected, found, deviation_of(found, expected), allowed});
  }

  void numbers(const BaselineNumbers& expected, const BaselineNumbers& found) {
    count("elements", expected.elements, found.elements);
    zeros(expected.zeros, found.zeros);
    count("nan", expected.nan, found.nan);
    count("posinf", expected.posinf, found.posinf);
    count("neginf", expected.neginf, found.neginf);
    number("norm", expected.norm, found.norm);
    number("max_abs", expected.max_abs, found.max_abs);
  }

 private:
  [[nodiscard]] CheckStatus status(bool passed) const noexcept {
    return passed ? CheckStatus::passed : exact_ ? CheckStatus::changed : CheckStatus::failed;
  }

  void near(std::string_view what, std::uint64_t expected, std::uint64_t found, double allowed) {
    const std::uint64_t apart = expected > found ? expected - found : found - expected;
    const double deviation = deviation_of(static_cast<double>(found), static_cast<double>(expected));
    const bool passed = apart == 0 || static_cast<double>(apart) <= allowed;
    entry_.items.push_back({what, status(passed), expected, found, apart == 0 ? 0.0 : deviation, allowed});
  }

  CheckedEntry& entry_;
  BaselineTolerance tolerance_;
  bool exact_;
};

/// The whole model and the parameters of a dump, each with its NaN and infinities counted unless they are allowed.
std::vector<CheckedEntry> entries_of(const Baseline& measured, bool allow_nonfinite) {
  std::vector<CheckedEntry> entries;
  entries.reserve(measured.parameters.size() + 1);
  const auto add = [&](const std::string& name, std::uint64_t nonfinite) {
    CheckedEntry& entry = entries.emplace_back();
    entry.name = name;
    if (allow_nonfinite) return;
    entry.items.push_back(
        {"nonfinite", nonfinite == 0 ? CheckStatus::passed : CheckStatus::failed, std::uint64_t{0}, nonfinite});
  };
  add("", measured.total.nonfinite());
  for (const BaselineParameter& parameter : measured.parameters) add(parameter.name, parameter.numbers.nonfinite());
  return entries;
}

// ---------------------------------------------------------------------------------------------------------------------
// What to say of it
// ---------------------------------------------------------------------------------------------------------------------

/// The largest deviation of a number; empty if no number is off.
std::optional<double> worst_deviation(const CheckedEntry& entry) {
  std::optional<double> worst;
  for (const CheckItem& item : entry.items) {
    if (item.status == CheckStatus::passed || !item.deviation) continue;
    if (!worst || *item.deviation > *worst) worst = item.deviation;
  }
  return worst;
}

/// How bad: by kind, and of `differs` by how many times more than allowed a norm is off. Counts of elements and of NaN
/// come before norms, counts of zeros after them.
std::pair<std::size_t, double> badness(const Finding& finding, const CheckedEntry* entry) {
  constexpr std::array<std::string_view, 14> kWorstFirst{"no-baseline",
                                                         "conditions-differ",
                                                         "nonfinite",
                                                         "total-nonfinite",
                                                         "nothing-seen",
                                                         "replicas-differ",
                                                         "tied-differ",
                                                         "ranks-disagree",
                                                         "recorded-differs",
                                                         "missing",
                                                         "extra",
                                                         "shape",
                                                         "dtype",
                                                         "differs"};
  const auto rank =
      static_cast<std::size_t>(std::find(kWorstFirst.begin(), kWorstFirst.end(), finding.kind) - kWorstFirst.begin());
  double times = 0.0;
  if (entry != nullptr && finding.kind == "differs") {
    for (const CheckItem& item : entry->items) {
      if (item.status == CheckStatus::passed || item.what == "zeros") continue;
      const bool is_number = item.what == "norm" || item.what == "max_abs";
      if (!is_number) {
        times = kInfinity;
      } else if (item.allowed && *item.allowed > 0.0) {
        times =
            std::max(times, std::abs(std::get<double>(item.found) - std::get<double>(item.expected)) / *item.allowed);
      } else {
        times = std::max(times, std::max(1.0, item.deviation.value_or(0.0) / std::numeric_limits<double>::epsilon()));
      }
    }
    if (std::isnan(times)) times = kInfinity;
  }
  return {rank, times};
}

/// The findings of entries that did not pass, and `others`, worst first; equals stay in model order.
std::vector<Finding> worst_first(const std::vector<CheckedEntry>& entries, std::vector<Finding> others) {
  struct Ranked {
    std::pair<std::size_t, double> badness;
    Finding finding;
  };
  std::vector<Ranked> ranked;
  for (Finding& finding : others) {
    const auto how_bad = badness(finding, nullptr);
    ranked.push_back({how_bad, std::move(finding)});
  }
  for (const CheckedEntry& entry : entries) {
    // What is not finite has a finding of the dump's own, which says where.
    if (entry.passed() || entry.failed("nonfinite")) continue;
    Finding finding = finding_of(entry);
    const auto how_bad = badness(finding, &entry);
    ranked.push_back({how_bad, std::move(finding)});
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](const Ranked& a, const Ranked& b) {
    if (a.badness.first != b.badness.first) return a.badness.first < b.badness.first;
    return a.badness.second > b.badness.second;
  });
  std::vector<Finding> findings;
  for (Ranked& each : ranked) findings.push_back(std::move(each.finding));
  return findings;
}

std::string entries_text(std::size_t count) {
  return fmt::format("{} {}", count, count == 1 ? "entry" : "entries");
}

std::string number_or_none(const std::optional<double>& number) {
  return number ? fmt::format("{}", *number) : "none";
}

std::vector<Finding> conditions_that_differ(const BaselineConditions& recorded, const BaselineConditions& measured) {
  std::vector<Finding> findings;
  const auto compare = [&](std::string_view what, const std::string& expected, const std::string& found) {
    if (expected == found) return;
    Finding finding;
    finding.kind = "conditions-differ";
    finding.message = fmt::format("{} {}, in the baseline {}", what, found, expected);
    findings.push_back(std::move(finding));
  };
  compare("norm type", fmt::format("{}", recorded.norm_type), fmt::format("{}", measured.norm_type));
  compare("numerics", recorded.numerics, measured.numerics);
  compare("label token divisor", number_or_none(recorded.label_token_divisor),
          number_or_none(measured.label_token_divisor));
  compare("expert divisor", number_or_none(recorded.expert_divisor), number_or_none(measured.expert_divisor));
  return findings;
}

/// What no baseline can make good: a gate over nothing, and NaN unless they are allowed.
bool is_unacceptable(const Finding& finding, bool allow_nonfinite) {
  if (finding.kind == "nothing-seen") return true;
  const bool of_copies = finding.kind == "replicas-differ" || finding.kind == "tied-differ";
  const bool nonfinite = finding.kind == "nonfinite" || finding.kind == "total-nonfinite" ||
                         (of_copies && !std::isfinite(finding.value.value_or(0.0)));
  return nonfinite && !allow_nonfinite;
}

/// Whether a parameter is as recorded, within its tolerance.
bool fits(const BaselineParameter& expected, const BaselineParameter& found, const BaselineTolerance& tolerance) {
  if (expected.shape != found.shape || expected.dtype != found.dtype) return false;
  CheckedEntry entry;
  Comparison(entry, tolerance, /*exact=*/false).numbers(expected.numbers, found.numbers);
  return entry.passed();
}

void compare_entries(const Baseline& recorded, const Baseline& measured, Tolerances& tolerances, bool exact,
                     CheckResult& result) {
  CheckedEntry& whole = result.entries.front();
  whole.compared = true;
  Comparison(whole, tolerances.own(), exact).numbers(recorded.total, measured.total);
  const EntryPairs pairs = pair_entries(recorded.parameters, measured.parameters,
                                        [&](const BaselineParameter& expected, const BaselineParameter& found) {
                                          return fits(expected, found, tolerances.of(found.name));
                                        });
  for (std::size_t i = 0; i < measured.parameters.size(); ++i) {
    const BaselineParameter& found = measured.parameters[i];
    CheckedEntry& entry = result.entries[i + 1];
    entry.compared = true;
    entry.place = pairs.measured[i].place;
    Comparison comparison(entry, tolerances.of(found.name), exact);
    if (!pairs.measured[i].recorded) {
      comparison.equal("present", false, true);
      continue;
    }
    const BaselineParameter& expected = recorded.parameters[*pairs.measured[i].recorded];
    comparison.equal("shape", expected.shape, found.shape);
    comparison.equal("dtype", std::string(name(expected.dtype)), std::string(name(found.dtype)));
    comparison.numbers(expected.numbers, found.numbers);
  }
  for (const GoneEntry& gone : pairs.gone) {
    CheckedEntry& entry = result.entries.emplace_back();
    entry.name = recorded.parameters[gone.recorded].name;
    entry.compared = true;
    entry.place = gone.place;
    Comparison(entry, {}, exact).equal("present", true, false);
  }
}

/// Whether a finding is no worse than a recorded one of its kind and parameter: on no other rank, and by no more. With
/// `exact`, whether it is the same.
bool covers(const BaselineFinding& recorded, const Finding& finding, const BaselineTolerance& tolerance, bool exact) {
  if (recorded.value.has_value() != finding.value.has_value()) return false;
  if (exact) {
    return recorded.ranks == finding.ranks && (!recorded.value || same(*recorded.value, *finding.value));
  }
  if (!std::includes(recorded.ranks.begin(), recorded.ranks.end(), finding.ranks.begin(), finding.ranks.end())) {
    return false;
  }
  if (!recorded.value || same(*recorded.value, *finding.value)) return true;
  if (std::isnan(*recorded.value) || std::isnan(*finding.value)) return false;
  return *finding.value <= *recorded.value + tolerance.absolute + tolerance.relative * std::abs(*recorded.value);
}

/// "0.5 on ranks 0, 3"
std::string extent_of(const BaselineFinding& recorded) {
  std::string text = recorded.value ? fmt::format("{:.6g}", *recorded.value) : "no value";
  if (!recorded.ranks.empty()) text += " on " + named_ranks(recorded.ranks);
  return text;
}

/// Takes those that the baseline knows out of `findings`; what has become worse is none of them.
std::vector<Finding> unknown_findings(const Baseline& recorded, const std::vector<Finding>& findings,
                                      Tolerances& tolerances, const CheckOptions& options, CheckResult& result) {
  std::multimap<std::pair<std::string_view, std::string_view>, std::size_t> places;  // in recorded.findings
  for (std::size_t i = 0; i < recorded.findings.size(); ++i) {
    places.insert({{recorded.findings[i].kind, recorded.findings[i].parameter}, i});
  }
  std::vector<bool> seen(recorded.findings.size(), false);
  std::vector<Finding> unknown;
  for (const Finding& finding : findings) {
    const auto [begin, end] = places.equal_range({finding.kind, finding.parameter});
    const BaselineTolerance tolerance = finding.parameter.empty() ? tolerances.own() : tolerances.of(finding.parameter);
    bool known = false;
    for (auto place = begin; place != end; ++place) {
      seen[place->second] = true;
      known = known || covers(recorded.findings[place->second], finding, tolerance, options.update);
    }
    if (known && !is_unacceptable(finding, options.allow_nonfinite)) continue;
    unknown.push_back(finding);
    if (known || begin == end) continue;
    unknown.back().message += fmt::format("; {} {}", options.update ? "the baseline has" : "worse than the baseline's",
                                          extent_of(recorded.findings[begin->second]));
  }
  for (std::size_t i = 0; i < seen.size(); ++i) result.known.push_back({recorded.findings[i], seen[i]});
  return unknown;
}

Finding tolerance_change(const BaselineTolerance& from, const BaselineTolerance& to) {
  Finding change;
  change.kind = "tolerance";
  change.message = fmt::format("tolerance rtol {} atol {}, was rtol {} atol {}", to.relative, to.absolute,
                               from.relative, from.absolute);
  return change;
}

/// What will stand in the file, and what of it is news.
void update(const Baseline* recorded, const Baseline& measured, const std::vector<Finding>& findings,
            const CheckOptions& options, Tolerances& tolerances, CheckResult& result) {
  Baseline next = measured;
  next.tolerance = tolerances.own();
  if (recorded != nullptr) {
    next.rules = recorded->rules;
    std::vector<Finding> news = conditions_that_differ(recorded->conditions, measured.conditions);
    for (Finding& finding : unknown_findings(*recorded, findings, tolerances, options, result)) {
      news.push_back(std::move(finding));
    }
    const BaselineTolerance& old = recorded->tolerance;
    if (!same(old.relative, next.tolerance.relative) || !same(old.absolute, next.tolerance.absolute)) {
      news.push_back(tolerance_change(old, next.tolerance));
    }
    compare_entries(*recorded, measured, tolerances, /*exact=*/true, result);
    result.changes = worst_first(result.entries, std::move(news));
    if (baseline_text(*recorded) == baseline_text(next)) {
      result.outcome = CheckOutcome::unchanged;
      return;
    }
  } else {
    result.changes = findings;
  }
  result.outcome = CheckOutcome::updated;
  result.next = std::move(next);
}

/// The verdict that needs no baseline, if there is one.
bool refuse_values(const Baseline& measured, const std::vector<Finding>& findings, const CheckOptions& options,
                   CheckResult& result) {
  result.conditions = measured.conditions;
  result.entries = entries_of(measured, options.allow_nonfinite);
  const bool refused = std::any_of(findings.begin(), findings.end(), [&](const Finding& finding) {
    return is_unacceptable(finding, options.allow_nonfinite);
  });
  if (!refused) return false;
  result.outcome = CheckOutcome::regressed;
  result.update_refused = options.update;
  result.findings = worst_first(result.entries, findings);
  return true;
}

void judge(const Baseline* recorded, const Baseline& measured, const std::vector<Finding>& findings,
           const CheckOptions& options, CheckResult& result) {
  BaselineTolerance own = recorded != nullptr ? recorded->tolerance : BaselineTolerance{};
  own.relative = options.relative.value_or(own.relative);
  own.absolute = options.absolute.value_or(own.absolute);
  Tolerances tolerances(recorded != nullptr ? recorded->rules : std::vector<ToleranceRule>{}, own);
  if (recorded != nullptr) {
    result.recorded = recorded->conditions;
    result.recorded_step = recorded->step;
    result.tolerance = own;
  }
  if (options.update) {
    update(recorded, measured, findings, options, tolerances, result);
  } else if (recorded == nullptr) {
    Finding none;
    none.kind = "no-baseline";
    none.message = "there is no baseline: gradclip check --update writes one from this dump";
    result.outcome = CheckOutcome::no_baseline;
    result.findings = {std::move(none)};
  } else if (std::vector<Finding> differ = conditions_that_differ(recorded->conditions, measured.conditions);
             !differ.empty()) {
    result.outcome = CheckOutcome::conditions_differ;
    result.findings = std::move(differ);
  } else {
    compare_entries(*recorded, measured, tolerances, /*exact=*/false, result);
    result.findings = worst_first(result.entries, unknown_findings(*recorded, findings, tolerances, options, result));
    result.outcome = result.findings.empty() ? CheckOutcome::passed : CheckOutcome::regressed;
  }
  if (recorded != nullptr && result.entries.front().compared) result.unused_patterns = tolerances.unused();
}

}  // namespace

std::string_view name(CheckStatus status) noexcept {
  switch (status) {
    case CheckStatus::passed:
      return "passed";
    case CheckStatus::failed:
      return "failed";
    case CheckStatus::changed:
      return "changed";
  }
  return "failed";
}

std::string_view name(CheckOutcome outcome) noexcept {
  switch (outcome) {
    case CheckOutcome::passed:
      return "passed";
    case CheckOutcome::regressed:
      return "regressed";
    case CheckOutcome::no_baseline:
      return "no-baseline";
    case CheckOutcome::conditions_differ:
      return "conditions-differ";
    case CheckOutcome::updated:
      return "updated";
    case CheckOutcome::unchanged:
      return "unchanged";
  }
  return "regressed";
}

bool CheckedEntry::passed() const noexcept {
  return std::all_of(items.begin(), items.end(),
                     [](const CheckItem& item) { return item.status == CheckStatus::passed; });
}

bool CheckedEntry::failed(std::string_view what) const noexcept {
  return std::any_of(items.begin(), items.end(),
                     [&](const CheckItem& item) { return item.what == what && item.status != CheckStatus::passed; });
}

Finding finding_of(const CheckedEntry& entry) {
  Finding finding;
  finding.parameter = entry.name;
  if (const CheckItem& first = entry.items.back(); first.what == "present") {
    const bool is_there = std::get<bool>(first.found);
    finding.kind = is_there ? "extra" : "missing";
    const EntryPlace& place = entry.place;
    if (place.of_recorded == 0 || place.of_measured == 0) {
      finding.message = is_there ? "the baseline does not have it" : "the baseline has it, the dump does not";
    } else {
      finding.message = fmt::format(
          "the baseline has {} of that name, the dump {}: the {} no. {} is without a counterpart",
          entries_text(place.of_recorded), place.of_measured, is_there ? "dump's" : "baseline's", place.number);
    }
    return finding;
  }
  finding.kind = entry.failed("shape") ? "shape" : entry.failed("dtype") ? "dtype" : "differs";
  if (finding.kind == "differs") finding.value = worst_deviation(entry);
  finding.message = entry.name.empty() ? "whole model: " : "";
  if (entry.place.of_measured > 1) {
    finding.message = fmt::format("no. {} of {}: ", entry.place.number, entries_text(entry.place.of_measured));
  }
  finding.message += explain(entry);
  return finding;
}

CheckResult check_against(const std::filesystem::path& file, const Baseline& measured,
                          const std::vector<Finding>& findings, const CheckOptions& options) {
  CheckResult result;
  if (!refuse_values(measured, findings, options, result)) {
    const std::optional<Baseline> recorded = read_baseline(file);
    judge(recorded ? &*recorded : nullptr, measured, findings, options, result);
  }
  result.path = file.string();
  return result;
}

CheckResult check_against(const Baseline* recorded, const Baseline& measured, const std::vector<Finding>& findings,
                          const CheckOptions& options) {
  CheckResult result;
  if (!refuse_values(measured, findings, options, result)) judge(recorded, measured, findings, options, result);
  return result;
}

std::string text_of(const CheckValue& value) {
  struct Text {
    std::string operator()(std::monostate) const { return "-"; }
    std::string operator()(bool truth) const { return truth ? "yes" : "no"; }
    std::string operator()(std::uint64_t count) const { return fmt::to_string(count); }
    std::string operator()(double number) const { return fmt::format("{}", number); }
    std::string operator()(const std::string& text) const { return text; }
    std::string operator()(const std::vector<std::int64_t>& shape) const {
      return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, "x"));
    }
  };
  return std::visit(Text{}, value);
}

std::string explain(const CheckedEntry& entry) {
  std::string text;
  for (const CheckItem& item : entry.items) {
    if (item.status == CheckStatus::passed) continue;
    if (!text.empty()) text += "; ";
    text += fmt::format("{} {}, baseline {}", item.what, text_of(item.found), text_of(item.expected));
    const double* found = std::get_if<double>(&item.found);
    const double* expected = std::get_if<double>(&item.expected);
    if (found == nullptr || expected == nullptr || !std::isfinite(*found) || !std::isfinite(*expected)) continue;
    text += fmt::format(" (off by {:.3g}", std::abs(*found - *expected));
    if (item.deviation && std::isfinite(*item.deviation)) text += fmt::format(", {:.3g} %", *item.deviation * 100.0);
    if (item.status == CheckStatus::failed && item.allowed) text += fmt::format(", allowed {:.3g}", *item.allowed);
    text += ')';
  }
  return text;
}

}  // namespace gradclip
