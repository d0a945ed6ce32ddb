#pragma once
// What a command found, as plain data: filled once from the results of other rooms, rendered by text.hpp and
// structured.hpp. Totals are only read here, never computed. The keys are those of docs/reports.md.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradclip/base/dtype.hpp"
#include "gradclip/base/finding.hpp"
#include "gradclip/clip/clip.hpp"
#include "gradclip/dump/manifest.hpp"

namespace gradclip {

inline constexpr int kReportVersion = 1;

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

/// How the command ran: the only part of a report that may differ between two runs over one dump.
struct ReportRun {
  int processes = 1;
  std::string device;  ///< "cpu", "cuda"
  std::string device_detail;
  std::string device_reason;
  std::string communicator;  ///< "single", "mpi", "nccl"
  std::string communicator_detail;
  std::string communicator_reason;
  std::size_t threads = 1;                ///< of each process
  std::string numerics;                   ///< as --numerics takes it
  std::uint64_t memory_budget_bytes = 0;  ///< of each process
  std::uint64_t memory_peak_bytes = 0;    ///< of the process that needed most
  double seconds_read = 0.0;              ///< a thread's average, of the slowest process; so are the next two
  double seconds_compute = 0.0;
  double seconds_write = 0.0;
  double seconds_total = 0.0;  ///< wall clock
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
};

struct ReportClip {
  std::optional<double> max_norm;
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
  std::optional<std::pair<std::int64_t, std::int64_t>> microbatch;
  TrainingRecord training;
  std::vector<ReportMesh> meshes;
  std::vector<ReportPlainTensor> plain_tensors;
  bool has_checksum = false;
  std::uint64_t files_with_checksum = 0;
};

struct Report {
  std::string command;
  ReportDump dump;
  std::optional<std::string> output;       ///< command clip: where the clipped dump is
  std::optional<ReportRun> run;            ///< empty for inspect
  std::optional<ReportContents> contents;  ///< inspect
  std::optional<ReportScale> scale;
  std::optional<ReportNorm> norm;
  std::optional<ReportClip> clip;
  std::optional<ReportReference> reference;  ///< empty where --total-norm gave the total
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

/// The report of `inspect`, from the manifest alone.
[[nodiscard]] Report inspect_report(const std::filesystem::path& dump, const Manifest& manifest);

/// Index of the first parameter with a NaN or an infinity, in model order.
[[nodiscard]] std::optional<std::size_t> first_nonfinite_parameter(const Report& report);

/// Named facts in sections, for `doctor`: rendered like a report, without a fixed set of keys.
struct FactSection {
  std::string name;
  std::vector<std::pair<std::string, std::string>> facts;
};
struct FactSheet {
  std::string command;
  std::vector<FactSection> sections;
};

}  // namespace gradclip
