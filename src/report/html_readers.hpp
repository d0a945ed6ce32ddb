#pragma once
// The readers of html_data.hpp by command: each takes its keys, which reports of other commands do not have. Inside
// this room.

#include "gradclip/dump/json_document.hpp"
#include "gradclip/report/html_data.hpp"

namespace gradclip {

/// `clip`, `norms`, `inspect`: totals, meshes, parts, parameters.
void read_measured(const JsonField& root, PageReport& report);
/// `diff`, and `accumulate --check`: the other dump and the comparison.
void read_diff(const JsonField& root, PageReport& report);
/// `check`: items and baseline.
void read_check(const JsonField& root, PageReport& report);
/// `norms --sweep`: steps and limits.
void read_sweep(const JsonField& root, PageReport& report);
/// `tokens`: labels by rank and by microbatch.
void read_tokens(const JsonField& root, PageReport& report);
/// `accumulate`: its microbatches.
void read_accumulated(const JsonField& root, PageReport& report);
/// `merge`: what OUT holds.
void read_merged(const JsonField& root, PageReport& report);

}  // namespace gradclip
