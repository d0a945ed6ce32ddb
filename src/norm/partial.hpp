#pragma once
// The full value of gradients with Partial dimensions, formed chunk by chunk from the addends of all ranks.

#include <vector>

#include "gradclip/norm/shard_sums.hpp"

namespace gradclip {

/// The combined value of one slice of a Partial parameter.
struct PartialSliceSum {
  std::size_t parameter = 0;
  std::int32_t rank = 0;  ///< that holds the first addend
  TensorStatistics statistics;
};

/// Statistics of every Partial parameter's combined value, written into `parameters` (by parameter). The addends are
/// scaled first, then combined in coordinate order in float64; a None addend is 0 for sum and avg. Where Partial
/// dimensions have different operations, the last dimension is reduced first. Collective, in rounds within the memory
/// budget. Errors: Error(bad_input) for a None addend of max, min or product, and for `product` where `factors_of`
/// scales.
/// Where a rank's addend is None and another rank holds a copy of it, that copy is taken.
/// @param histograms  counts the combined values, moved to the host; null: nobody does
/// @return  the combined slices of all parameters with the rank of their first addend, in a fixed order
std::vector<PartialSliceSum> combine_partials(Run& run, const FactorsOf& factors_of, NormOrder order,
                                              const Absences& absences, std::vector<TensorStatistics>& parameters,
                                              HistogramCollector* histograms = nullptr);

/// The reference's terms of full tensors: the combined values rounded to the gradient's type, as full_tensor() holds
/// them, then round(round(|x| / m)^p) of each. Only for parameters whose own placements are Partial.
/// @param normalizers  m by parameter
/// @return  by parameter, empty for the others
[[nodiscard]] std::vector<TensorStatistics> reference_terms_of_full_tensors(Run& run, const FactorsOf& factors_of,
                                                                            NormOrder order, const Absences& absences,
                                                                            std::span<const double> normalizers);

}  // namespace gradclip
