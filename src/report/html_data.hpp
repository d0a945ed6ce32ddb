#pragma once
// What a page shows, as plain data: read from a JSON report, which is untrusted. Inside this room. A page is made from
// the JSON whichever way the report came, so that `--report FILE.html` and `report FILE.json` give the same page.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradclip/base/finding.hpp"
#include "gradclip/mesh/placement.hpp"

namespace gradclip {

struct PageDump {
  std::string path;
  std::optional<std::int64_t> step;
  std::uint64_t world_size = 0;
  std::uint64_t parameters = 0;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
};

/// How many values of a type's own rounding get lost, in the report's words: {"underflow", 3}.
struct PageCast {
  std::string type;
  std::vector<std::pair<std::string, std::uint64_t>> counts;
};

/// Elements by binary exponent: 2^e <= |x| < 2^(e + 1).
struct PageHistogram {
  std::int64_t first = 0;  ///< the exponent of counts[0]
  std::vector<std::uint64_t> counts;
  std::uint64_t zeros = 0;
  std::uint64_t nonfinite = 0;
  std::vector<PageCast> casts;
};

/// A parameter of `clip`, `norms`, `inspect`. What was not measured is empty.
struct PageParameter {
  std::string name;
  std::string shape;  ///< "16 × 24", "scalar"
  std::string dtype;
  std::string mesh;        ///< empty: a plain tensor
  std::string placements;  ///< of the parameter
  std::string gradient_placements;
  bool expert = false;
  bool counted = true;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  std::optional<double> norm;
  std::optional<double> share;
  std::optional<double> max_abs;
  std::optional<double> min_abs;
  std::optional<double> mean;
  std::optional<std::uint64_t> zeros;
  std::optional<std::uint64_t> subnormals;
  std::uint64_t nan = 0;
  std::uint64_t posinf = 0;
  std::uint64_t neginf = 0;
  std::string first_nonfinite;  ///< "[0, 3] on rank 1"
  std::optional<PageHistogram> histogram;

  [[nodiscard]] std::uint64_t nonfinite() const noexcept { return nan + posinf + neginf; }
};

struct PageMesh {
  std::string name;
  std::vector<std::string> dim_names;
  std::vector<std::int64_t> shape;
  std::vector<std::int32_t> ranks;  ///< row-major, as many as the shape says
  bool device_mesh = false;
};

/// A row of groups, stages, dtypes or a view.
struct PagePart {
  std::string name;
  std::optional<std::size_t> mesh;    ///< groups: index into PageReport::meshes, if the report has it
  std::vector<Placement> placements;  ///< groups: as many as that mesh has dimensions
  std::uint64_t parameters = 0;
  std::uint64_t elements = 0;
  std::optional<double> norm;
  std::optional<double> share;
  std::optional<PageHistogram> histogram;  ///< lines of a view, with --histogram
};

struct PageParts {
  std::string title;  ///< "stage"
  std::vector<PagePart> parts;
};

struct PageReferenceTotal {
  double total = 0.0;
  std::optional<double> coefficient;
  std::vector<std::int32_t> ranks;
};

/// A parameter of `diff`.
struct PageDifference {
  std::string name;
  std::string name_in_other;
  std::string status;
  std::string shape;
  std::string dtype;  ///< "float32", "bfloat16 / float32"
  std::optional<std::uint64_t> elements;
  std::uint64_t different = 0;
  std::uint64_t nan_different = 0;
  std::optional<double> max_abs;
  std::string max_abs_index;
  std::optional<double> max_rel;
  std::optional<double> relative_l2;
  std::optional<double> relative_l2_epsilons;
  std::optional<double> cosine;
  std::optional<double> norm_ratio;
  std::string first_different;
};

/// An element of `diff --max-elements`.
struct PageElement {
  std::size_t parameter = 0;  ///< index into PageReport::differences
  std::string index;
  double a = 0.0;
  double b = 0.0;
};

/// An item of `check`. Values stand as the report has them.
struct PageItem {
  std::string parameter;
  std::string item;
  std::string status;
  std::string expected;
  std::string found;
  std::optional<double> deviation;
  std::optional<double> allowed;
};

/// What a baseline of `check` knows.
struct PageKnown {
  std::string kind;
  std::string parameter;
  bool seen = true;
};

/// A dump of `norms --sweep`.
struct PageStep {
  std::string path;
  std::optional<std::int64_t> step;
  std::optional<double> type;
  double total = 0.0;
  std::optional<std::uint64_t> findings;
};

/// A limit of `norms --sweep`.
struct PageSweepLine {
  double max_norm = 0.0;
  std::uint64_t clipped = 0;
  std::uint64_t steps = 0;
  std::optional<double> least, median, mean;  ///< coefficients
};

/// What `tokens` counted.
struct PageLabels {
  std::uint64_t sequences = 0;
  std::uint64_t elements = 0;
  std::uint64_t label_tokens = 0;
  std::uint64_t tail_padding = 0;
};

/// A rank of `tokens`.
struct PageRankLabels {
  std::uint64_t rank = 0;
  std::uint64_t coordinate = 0;
  bool counted = true;
  std::uint64_t microbatches = 0;
  PageLabels labels;
};

/// A microbatch of `accumulate`. Texts are empty where nothing was recorded.
struct PageMicrobatch {
  std::uint64_t index = 0;
  std::string first_microbatch;
  std::string optimizer_step;
  std::string synchronised;
  std::string schedule_step;
  std::string ends_window;
};

/// A tensor that `merge` wrote.
struct PageTensor {
  std::string name;
  std::string name_in_output;
  std::string status;
  std::string shape;
  std::string dtype;
  std::string dtype_in_output;
  std::optional<double> scale_inv;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
};

/// A line of "label: value" that is shown as it is.
using PageFact = std::pair<std::string, std::string>;

struct PageReport {
  std::string command;
  PageDump dump;
  std::optional<PageDump> other;  ///< diff
  std::string rule;               ///< diff
  std::string first_difference;   ///< diff: the parameter
  std::string first_index;        ///< diff: of its first element that differs
  std::vector<PageFact> checked;  ///< verify
  std::vector<PageFact> run;
  std::vector<PageFact> contents;  ///< inspect
  std::string scale;

  std::optional<double> norm_type;
  std::optional<double> total;
  std::optional<PageParameter> all;  ///< statistics of the whole, without a name
  bool clips = false;
  std::optional<double> max_norm;
  std::optional<double> coefficient;
  std::optional<double> total_after;
  std::string outcome;  ///< of clip
  std::string arithmetic;
  std::string note;
  std::vector<PageReferenceTotal> totals;
  std::optional<double> recorded;
  std::optional<double> recorded_type;  ///< its p, where another one was measured
  std::optional<double> recorded_distance;

  std::vector<PageMesh> meshes;
  std::vector<PagePart> groups;
  std::vector<PageParts> parts;  ///< view, stages, types
  std::vector<PageParameter> parameters;
  std::vector<PageDifference> differences;
  std::vector<PageElement> worst;  ///< diff
  std::vector<PageItem> items;     ///< check; so are the next five
  std::string verdict;
  std::string summary;
  std::vector<PageFact> baseline;
  std::vector<PageKnown> known;
  std::vector<Finding> changes;
  std::vector<PageStep> steps;  ///< norms --sweep; so is the next
  std::vector<PageSweepLine> sweep;
  std::vector<PageRankLabels> rank_labels;  ///< tokens; so is the next
  std::vector<PageLabels> microbatch_labels;
  std::vector<PageMicrobatch> microbatches;  ///< accumulate
  std::vector<PageTensor> tensors;           ///< merge
  std::vector<Finding> findings;

  [[nodiscard]] bool measured() const noexcept { return total.has_value() && all.has_value(); }
};

/// @param where  the file, for messages
/// Errors: Error(bad_input) with file and key: text that is no JSON (json_document.hpp), another format or a newer
/// version, a key that is missing or of a wrong type.
[[nodiscard]] PageReport read_page_report(std::string_view json, const std::string& where);

}  // namespace gradclip
