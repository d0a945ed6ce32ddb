#pragma once
// What a person should hear of a comparison: one sentence where one cause explains many differences.

#include <optional>
#include <string>
#include <vector>

#include "gradclip/analysis/diff.hpp"

namespace gradclip {

/// A number that a training step may have multiplied or divided by.
struct KnownNumber {
  double value = 0.0;
  std::string meaning;
};

/// Label tokens, data-parallel size, world size, sizes of mesh dimensions, the divisors made of them; of both dumps,
/// and what B's is to A's.
[[nodiscard]] std::vector<KnownNumber> known_numbers(const Manifest& a, const Manifest& b);

/// B = r × A all over the parameter: every b / a is the same but for roundings of the narrower type, or what r × A
/// leaves of B is no more than such roundings in the 2-norm. Empty where r is 1 within the rule, and where a NaN, an
/// infinity or a None is different.
[[nodiscard]] std::optional<ConstantRatio> constant_ratio(const ParameterDifference& parameter);

/// The number that a ratio stands for: a known number or its reciprocal, a whole number or its reciprocal, a power of
/// two; else the middle.
[[nodiscard]] double likely_number(const ConstantRatio& ratio, const std::vector<KnownNumber>& known);

/// Parameters that one number explains.
struct RatioGroup {
  ConstantRatio ratio;
  std::vector<std::size_t> parameters;
  double number = 0.0;  ///< what the ratio was taken for
};

/// Any two numbers have a ratio: a single element joins others' ratio and makes none of its own.
[[nodiscard]] std::vector<RatioGroup> ratio_groups(const std::vector<ParameterDifference>& parameters,
                                                   const std::vector<KnownNumber>& known);

/// Findings in order: nothing-seen; constant-ratio, one for each ratio; differs, missing, extra, shape in model order.
/// A parameter with a constant ratio has no finding of its own: that of the ratio says what it leaves over.
[[nodiscard]] std::vector<Finding> diff_findings(const Manifest& a, const Manifest& b,
                                                 const std::vector<ParameterDifference>& parameters,
                                                 const std::vector<RatioGroup>& groups,
                                                 const std::vector<KnownNumber>& known);

}  // namespace gradclip
