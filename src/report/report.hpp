#pragma once
// What a command found, as plain data: filled once from the results of other rooms, rendered by text.hpp and
// structured.hpp. Totals are only read here, never computed. The keys are those of docs/reports.md.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "gradclip/analysis/baseline_check.hpp"
#include "gradclip/analysis/diff.hpp"
#include "gradclip/analysis/merge.hpp"
#include "gradclip/base/dtype.hpp"
#include "gradclip/base/finding.hpp"
#include "gradclip/clip/clip.hpp"
#include "gradclip/clip/sweep.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/training/label_tokens.hpp"

namespace gradclip {

inline constexpr int kReportVersion = 1;

/// What a program reads of one number or word; null: there is none.
using ReportValue = std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string>;

/// The dump that was read.
struct ReportDump {
  std::string path;
  std::optional<std::int64_t> step;
  std::int32_t world_size = 0;
  std::uint64_t parameters = 0;
  std::uint64_t elements =
      0;                    ///< of the global tensors, every parameter entry once; distinct plain tensors once a rank
  std::uint64_t bytes = 0;  ///< of gradients in all rank files, copies and addends included, as the manifest says
};

/// A thread's average in the slowest process.
struct ReportSeconds {
  double read = 0.0;
  double compute = 0.0;
  double write = 0.0;
};

/// What the collectives of the process with the largest volume carried (comm/counting_communicator.hpp).
struct ReportCommunication {
  std::uint64_t collectives = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
};

/// How the command ran: the only part of a report that may differ between two runs over one dump.
struct ReportRun {
  int processes = 1;
  std::string device;  ///< "cpu", "cuda"
  std::string device_detail;
  std::string device_reason;
  std::string communicator;  ///< "single", "mpi", "nccl"
  std::string communicator_detail;
  std::string communicator_reason;
  std::size_t threads = 1;                                  ///< of each process
  std::string numerics;                                     ///< as --numerics takes it
  std::uint64_t memory_budget_bytes = 0;                    ///< of each process
  std::uint64_t memory_peak_bytes = 0;                      ///< of the process that needed most
  std::optional<std::uint64_t> device_memory_budget_bytes;  ///< the smallest of all processes; empty on the CPU
  std::optional<std::uint64_t> device_memory_peak_bytes;    ///< likewise, of the process that needed most
  std::optional<std::uint32_t> kept_files;                  ///< of --resume: rank files that were there already
  std::optional<std::string> offload;                       ///< what --offload led to; empty without it
  std::optional<std::string> locality;                      ///< what --locality files led to; empty without it
  std::optional<ReportSeconds> seconds_of_a_thread;         ///< empty: not measured
  double seconds_total = 0.0;                               ///< wall clock
  ReportCommunication communication;                        ///< so far
};

struct ReportScale {
  std::optional<double> label_token_divisor;
  std::optional<double> expert_divisor;
  std::string explanation;
};

/// Statistics of some gradients after scaling. Doubles may be NaN or infinite.
struct ReportStatistics {
  std::uint64_t elements = 0;
  double max_abs = 0.0;
  std::optional<double> min_abs;  ///< smallest non-zero finite magnitude; empty if there is none
  double mean = 0.0;
  std::uint64_t zeros = 0;
  std::uint64_t subnormals = 0;
  std::uint64_t nan = 0;
  std::uint64_t posinf = 0;
  std::uint64_t neginf = 0;

  [[nodiscard]] std::uint64_t nonfinite() const noexcept { return nan + posinf + neginf; }
};

struct ReportNorm {
  double type = 2.0;  ///< p; may be infinity
  double total = 0.0;
  std::optional<ReportStatistics> statistics;  ///< empty where --total-norm gave the total
  std::optional<ExponentHistogram> histogram;  ///< of all; with --histogram
};

struct ReportClip {
  std::optional<double> max_norm;
  bool declined = false;              ///< a max norm was recorded, and --no-clip is why there is none
  std::optional<double> coefficient;  ///< empty: nothing is clipped, or recorded ranks have several
  bool clipped = false;
  bool skipped = false;               ///< not clipped because the total is not finite
  std::string nonfinite;              ///< the policy, as --nonfinite takes it
  std::optional<double> total_after;  ///< measured on what was written
};

struct ReportReferenceTotal {
  double total = 0.0;
  std::optional<double> coefficient;  ///< empty without a max_norm
  std::vector<std::int32_t> ranks;    ///< ascending
};

/// What the training step's own arithmetic gives, rank by rank, and what it logged.
struct ReportReference {
  std::string arithmetic;  ///< "exact", "automodel", "automodel-cpu", "torch"
  std::string note;        ///< why not the arithmetic that was asked for; else empty
  std::vector<ReportReferenceTotal> totals;
  std::optional<double> recorded;  ///< training.grad_norm
  /// Its p, where another one was measured; then nothing is compared with it.
  std::optional<double> recorded_type;
  /// |recorded − x| / |recorded| for x = norm.total and for the nearest of `totals`; empty without a finite pair.
  std::optional<double> recorded_distance;
  std::optional<double> recorded_distance_reference;
  std::optional<std::size_t> recorded_nearest;  ///< index into totals of that nearest one
};

/// Parameters of one mesh and placements.
struct ReportGroup {
  std::optional<std::string> mesh;      ///< empty: plain tensors
  std::vector<std::string> placements;  ///< one per mesh dimension
  std::uint64_t parameters = 0;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  std::optional<double> norm;  ///< empty where nothing was measured
  std::optional<double> share;
};

struct ReportStage {
  std::optional<std::int64_t> stage;  ///< coordinate on the pipeline axis; empty: outside the device mesh
  std::vector<std::int64_t> model_parts;
  std::uint64_t parameters = 0;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  std::optional<double> norm;
  std::optional<double> share;
};

struct ReportType {
  DType dtype = DType::float32;
  std::uint64_t parameters = 0;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  std::optional<double> norm;
  std::optional<double> share;
};

/// Where a parameter's first non-finite element is.
struct ReportPlace {
  std::vector<std::int64_t> index;  ///< global, one entry per dimension
  std::int32_t rank = -1;           ///< recorded rank
};

struct ReportParameter {
  std::string name;
  std::int64_t model_part = 0;
  std::vector<std::int64_t> shape;
  DType dtype = DType::float32;
  std::size_t group = 0;  ///< index into Report::groups, which has its mesh and placements
  std::optional<std::vector<std::string>> gradient_placements;  ///< where they differ from the parameter's
  bool expert = false;
  bool counted = true;     ///< false: a later entry of a tied weight
  std::uint32_t none = 0;  ///< recorded ranks whose gradient was None
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  std::optional<double> norm;  ///< empty where nothing was measured; then so are the next three
  std::optional<double> share;
  std::optional<ReportStatistics> statistics;
  std::optional<ReportPlace> first_nonfinite;
  std::optional<ExponentHistogram> histogram;  ///< with --histogram
};

struct ReportMesh {
  std::string name;
  std::vector<std::string> dim_names;
  std::vector<std::int64_t> shape;
  std::vector<std::int32_t> ranks;  ///< row-major
  bool device_mesh = false;
  bool moe_mesh = false;
};

/// A tensor without a mesh.
struct ReportPlainTensor {
  std::size_t parameter = 0;  ///< index into Report::parameters
  std::string copies;         ///< "replicated", "distinct", "undeclared"
  std::uint64_t ranks = 0;    ///< how many hold one
};

/// What `inspect` adds: the rest of the manifest.
struct ReportContents {
  std::string state;
  std::string producer;
  std::optional<MicrobatchRecord> microbatch;
  TrainingRecord training;
  std::vector<ReportPlainTensor> plain_tensors;
  bool has_checksum = false;
  std::uint64_t files_with_checksum = 0;
};

/// What the lines of the table of `norms` are.
enum class ViewBy : std::uint8_t { parameter, module, group, stage, dtype, rank };
[[nodiscard]] std::string_view name(ViewBy by) noexcept;  ///< as --by takes it

/// Some of a model's gradients together.
struct ReportViewLine {
  std::string name;              ///< module, mesh and placements, stage, type, rank
  std::uint64_t parameters = 0;  ///< entries in it; by rank those that the rank holds
  double norm = 0.0;             ///< of the elements that count here; so are the statistics
  double share = 0.0;
  ReportStatistics statistics;
  std::optional<ExponentHistogram> histogram;  ///< with --histogram; not by rank
};

/// A model taken apart: the p-th powers of the lines' norms add up to the total's.
struct ReportView {
  ViewBy by = ViewBy::parameter;
  std::optional<std::size_t> depth;  ///< by module: levels from the root; empty: all
  std::vector<ReportViewLine> lines;
};

/// What `verify` looked at, and what vouches for it.
struct ReportVerification {
  bool manifest = false;              ///< whether it could be read: else nothing else was looked at
  bool manifest_checksum = false;     ///< whether it has one
  std::uint64_t files = 0;            ///< rank files that could be read
  std::uint64_t file_checksums = 0;   ///< rank files of which the manifest has a checksum
  std::uint64_t files_compared = 0;   ///< of them those that are there and were compared with it
  std::uint64_t shards = 0;           ///< gradients that were found in them
  std::uint64_t shard_checksums = 0;  ///< of them with a checksum of their own
  bool complete = true;               ///< nothing of the manifest had to be left out
};

/// An element that differs, with both values.
struct ReportElement {
  std::vector<std::int64_t> index;  ///< global
  double a = 0.0;
  double b = 0.0;
};

/// A number and where it is.
struct ReportExtreme {
  double value = 0.0;
  std::vector<std::int64_t> index;
};

/// One parameter of `diff`. What was not compared (missing, extra, shapes that differ) has no numbers.
struct ReportDifference {
  std::string name;                          ///< in A; of an extra one in B
  std::optional<std::string> name_in_other;  ///< in B, where a name map changed it
  std::string status;                        ///< "equal", "differs", "missing", "extra"
  std::optional<DType> dtype;                ///< in A
  std::optional<DType> dtype_in_other;       ///< in B
  std::vector<std::int64_t> shape;           ///< of the comparison; in A, or in B of an extra one, where there is none
  std::optional<double> relative;            ///< rtol that was applied
  std::optional<std::uint64_t> elements;     ///< empty: not compared; then so is the rest
  std::uint64_t different = 0;
  std::uint64_t nan_different = 0;
  std::uint64_t none_different = 0;
  std::optional<ReportExtreme> max_abs;  ///< empty where no numbers differ
  std::optional<ReportExtreme> max_rel;
  double relative_l2 = 0.0;
  double relative_l2_epsilons = 0.0;  ///< in epsilons of the narrower type
  std::optional<double> cosine;
  std::optional<double> norm_ratio;
  std::optional<std::vector<std::int64_t>> first_different;
  std::vector<ReportElement> worst;
};

/// Something that was recorded beside the gradients and is not the same in two dumps.
struct ReportNote {
  std::string what;  ///< a key of the manifest: "state", "step", "world_size", one of "training"
  ReportValue a = nullptr;
  ReportValue b = nullptr;
};

/// What `diff` adds; Report::dump is A.
struct ReportDiff {
  ReportDump other;                ///< B
  std::vector<ReportNote> notes;   ///< for information: no difference of gradients
  bool same_path = false;          ///< A and B are one directory
  std::optional<double> relative;  ///< empty: the epsilon of the narrower type; or ulps is given
  std::optional<double> absolute;
  std::optional<std::uint64_t> ulps;
  bool equal_nan = false;
  std::vector<ReportDifference> parameters;  ///< in A's model order, then what only B has
  std::optional<std::size_t> first;          ///< index into parameters: the first that is not equal
};

/// One dump of a sweep.
struct ReportSweepStep {
  std::string path;
  std::optional<std::int64_t> step;
  double type = 2.0;           ///< p
  double total = 0.0;          ///< exact
  std::uint64_t findings = 0;  ///< of the report's, that are about this dump
};

/// What several max_norms would have done to several steps.
struct ReportSweep {
  std::vector<ReportSweepStep> steps;  ///< in the order of their recorded steps
  std::uint64_t nonfinite = 0;         ///< steps whose total is NaN or infinite: in no line
  std::vector<SweepLine> lines;        ///< by max_norm, as they were given
};

/// A full tensor of `merge`.
struct ReportTensor {
  std::string name;       ///< in the output
  std::string parameter;  ///< in the dump
  std::vector<std::int64_t> shape;
  DType dtype = DType::float32;           ///< as written
  DType recorded_dtype = DType::float32;  ///< in the dump
  std::optional<float> scale_inv;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;  ///< 0 where it is not written
  std::string status;       ///< "written", "none", "repeated"
};

/// What `merge` adds.
struct ReportMerge {
  std::string format;                 ///< "dump", "safetensors"
  std::vector<ReportTensor> tensors;  ///< in model order
  std::uint64_t bytes = 0;            ///< of all tensors
  /// What the dump has and the output has not: "labels", "meshes", "moe_mesh", "training".
  std::vector<std::string> not_kept;
};

/// What `tokens` adds.
struct ReportTokens {
  LabelTokens counted;                   ///< its findings are the report's
  std::optional<std::int64_t> recorded;  ///< training.num_label_tokens
  std::optional<MicrobatchRecord> microbatch;
};

/// A microbatch of `accumulate`, in the step's order.
struct ReportMicrobatch {
  MicrobatchRecord record;
  bool ends_window = false;  ///< whether a reduction follows it
};

/// What `accumulate` adds.
struct ReportAccumulate {
  std::vector<ReportMicrobatch> microbatches;
  std::uint64_t windows = 0;
  std::uint64_t reduced = 0;          ///< parameters, over ranks
  std::vector<DType> reduce_dtypes;   ///< that were taken
  std::vector<DType> storage_dtypes;  ///< of the gradients in the output
  std::optional<std::string> output;  ///< empty: there is none
  std::uint64_t bytes = 0;            ///< of gradients in it
};

struct Report {
  std::string command;
  ReportDump dump;
  std::optional<std::string> output;               ///< clip, merge: where the output is
  std::optional<ReportRun> run;                    ///< empty for inspect
  std::optional<ReportContents> contents;          ///< inspect
  std::optional<ReportView> view;                  ///< norms --by anything but parameter
  std::optional<ReportVerification> verification;  ///< verify
  std::optional<ReportDiff> diff;                  ///< diff
  std::optional<CheckResult> check;                ///< check
  std::optional<ReportSweep> sweep;                ///< norms --sweep, which has nothing but this, run and findings
  std::optional<ReportMerge> merge;                ///< merge
  std::optional<ReportTokens> tokens;              ///< tokens
  std::optional<ReportAccumulate> accumulate;      ///< accumulate; with --check there is a diff too
  std::optional<ReportScale> scale;
  std::optional<ReportNorm> norm;
  std::optional<ReportClip> clip;
  std::optional<ReportReference> reference;  ///< empty where --total-norm gave the total
  std::vector<ReportMesh> meshes;            ///< clip, norms, inspect
  std::vector<ReportGroup> groups;
  std::vector<ReportStage> stages;
  std::vector<ReportType> dtypes;
  std::vector<ReportParameter> parameters;  ///< in manifest order
  std::vector<Finding> findings;
};

/// The report of `clip` and `norms`; for `norms` without the part `clip`.
/// @param command  as it was typed
/// @param dump     the input's path
/// @param output   the output's path, if one was written
[[nodiscard]] Report clip_report(std::string command, const std::filesystem::path& dump, const Manifest& manifest,
                                 const TrainingStep& step, const ClipOptions& options, const ClipResult& result,
                                 std::optional<std::string> output, ReportRun run);

/// A view of what clip_report() was made from. @param depth  by module only
/// @pre by is not parameter; result has a norm
[[nodiscard]] ReportView view_of(ViewBy by, std::optional<std::size_t> depth, const Manifest& manifest,
                                 const TrainingStep& step, const NormResult& result);

/// The statistics of a tensor as a report has them.
[[nodiscard]] ReportStatistics statistics_of(const TensorStatistics& tensor);

/// The report of `inspect`, from the manifest alone.
[[nodiscard]] Report inspect_report(const std::filesystem::path& dump, const Manifest& manifest);

/// The report of `verify`: the head, what was looked at, and findings.
/// @param manifest  null where it could not be read
[[nodiscard]] Report verify_report(const std::filesystem::path& dump, const Manifest* manifest,
                                   const ReportVerification& verification, std::vector<Finding> findings,
                                   ReportRun run);

/// The report of `diff`.
/// @param a, b  the dumps' paths
[[nodiscard]] Report diff_report(const std::filesystem::path& a, const Manifest& manifest_a,
                                 const std::filesystem::path& b, const Manifest& manifest_b, const DiffRule& rule,
                                 const DiffResult& result, ReportRun run);

/// The report of `check`: that of `norms`, with the verdict's findings in place of the dump's.
[[nodiscard]] Report check_report(const std::filesystem::path& dump, const Manifest& manifest, const TrainingStep& step,
                                  const ClipOptions& options, const ClipResult& result, CheckResult check,
                                  ReportRun run);

/// How many items of a check passed and how many did not (failed, or changed); parameters by all of their items.
struct CheckCounts {
  std::uint64_t items_passed = 0;
  std::uint64_t items_failed = 0;
  std::uint64_t parameters_passed = 0;
  std::uint64_t parameters_failed = 0;
};
[[nodiscard]] CheckCounts count_items(const CheckResult& check);

/// The verdict of `check` in one line, for the log of a CI system. Names in it are printable().
[[nodiscard]] std::string check_summary(const Report& report);

/// The report of `merge`. @param labels  whether a rank of the dump has labels
[[nodiscard]] Report merge_report(const std::filesystem::path& dump, const Manifest& manifest,
                                  const std::filesystem::path& output, MergeFormat format, const MergeResult& result,
                                  bool labels, ReportRun run);

/// The report of `tokens`.
[[nodiscard]] Report tokens_report(const std::filesystem::path& dump, const Manifest& manifest, LabelTokens counted,
                                   ReportRun run);

/// The report of `accumulate`.
/// @param dump  the first microbatch
[[nodiscard]] Report accumulate_report(const std::filesystem::path& dump, const Manifest& manifest,
                                       ReportAccumulate accumulated, std::vector<Finding> findings, ReportRun run);

/// Adds what --check found: `diff` compares the result with what training had.
void add_check(Report& report, Report diff);

/// The dump and its size, from the manifest.
[[nodiscard]] ReportDump report_dump(const std::filesystem::path& dump, const Manifest& manifest);

/// Index of the first parameter with a NaN or an infinity, in model order.
[[nodiscard]] std::optional<std::size_t> first_nonfinite_parameter(const Report& report);

/// One thing that is so: for people a text beside its name, for programs values under keys (docs/reports.md).
struct Fact {
  using Values = std::vector<std::pair<std::string, ReportValue>>;

  /// A text that is the same for both.
  Fact(std::string fact, std::string as_text) : name(fact), text(as_text), values{{std::move(fact), as_text}} {}
  Fact(std::string fact, std::string as_text, Values for_programs)
      : name(std::move(fact)), text(std::move(as_text)), values(std::move(for_programs)) {}

  std::string name;
  std::string text;
  Values values;
};

/// Named facts in sections, for `doctor`, `synth` and `accumulate`: rendered like a report, without a fixed set of
/// keys.
struct FactSection {
  std::string name;
  std::vector<Fact> facts;
};
struct FactSheet {
  std::string command;
  std::vector<FactSection> sections;
};

}  // namespace gradclip
