#pragma once
// The charts of a report: which numbers, put together how, with which words. Inside this room. Each writes one figure,
// or nothing where the report does not have what it shows.

#include "gradclip/report/html_data.hpp"
#include "gradclip/report/html_markup.hpp"

namespace gradclip {

// Norms
void write_layer_norms(Markup& html, const PageReport& report);
void write_module_norms(Markup& html, const PageReport& report);
void write_module_shares(Markup& html, const PageReport& report);
void write_layer_statistics(Markup& html, const PageReport& report);
void write_exponents(Markup& html, const PageReport& report);

// Steps
void write_steps(Markup& html, const PageReport& report);
void write_sweep(Markup& html, const PageReport& report);

// Ranks
void write_rank_totals(Markup& html, const PageReport& report);
void write_sharding(Markup& html, const PageReport& report);
void write_finding_ranks(Markup& html, const PageReport& report);

// Differences
void write_difference_norms(Markup& html, const PageReport& report);
void write_difference_statistics(Markup& html, const PageReport& report);

}  // namespace gradclip
