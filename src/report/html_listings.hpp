#pragma once
// The tables of a report: short ones as they stand, long ones as data for the script. Inside this room. Each writes
// nothing where the report does not have what it lists.

#include <vector>

#include "gradclip/report/html_data.hpp"
#include "gradclip/report/html_markup.hpp"

namespace gradclip {

/// What each recorded rank saw, with where it is on the device mesh.
void write_seen_totals(Markup& html, const PageReport& report);
void write_parts(Markup& html, const PageParts& parts);

void write_finding_table(Markup& html, const std::vector<Finding>& findings);
void write_parameter_table(Markup& html, const PageReport& report);
void write_difference_table(Markup& html, const PageReport& report);
void write_worst_table(Markup& html, const PageReport& report);
void write_item_table(Markup& html, const PageReport& report);
void write_known_table(Markup& html, const PageReport& report);
void write_step_table(Markup& html, const PageReport& report);
void write_sweep_table(Markup& html, const PageReport& report);

/// `tokens`, `accumulate` and `merge` (html_training.cpp).
void write_rank_label_table(Markup& html, const PageReport& report);
void write_microbatch_table(Markup& html, const PageReport& report);
void write_tensor_table(Markup& html, const PageReport& report);

}  // namespace gradclip
