#pragma once
// The command line as plain, validated structs. Each option comes from the command line, else from the environment
// (GRADCLIP_MAX_NORM for --max-norm), else from --config FILE.json (long option names as keys), else it is empty here
// and the dump's manifest or a default decides.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/clip/clip.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/synth/synthesize.hpp"
#include "gradclip/training/accumulate.hpp"
#include "machine.hpp"
#include "options_check.hpp"
#include "options_diff.hpp"
#include "options_merge.hpp"
#include "options_tokens.hpp"

namespace gradclip {

enum class OutputFormat : std::uint8_t { text, json };
enum class ColourChoice : std::uint8_t { automatic, always, never };

/// What processes see of the dump's directory.
enum class Locality : std::uint8_t { shared, files };

/// What every command takes.
struct CommonOptions {
  DeviceChoice device = DeviceChoice::automatic;
  std::optional<std::size_t> threads;
  std::optional<std::uint64_t> memory_budget;         ///< bytes of each process
  std::optional<std::uint64_t> device_memory_budget;  ///< clip, norms: bytes of each process
  bool offload = false;                               ///< clip, norms
  Locality locality = Locality::shared;               ///< clip, norms
  Numerics numerics = Numerics::exact;
  std::optional<std::filesystem::path> report;
  OutputFormat format = OutputFormat::text;
  std::optional<bool> progress;  ///< empty: the terminal decides
  bool quiet = false;
  bool strict = false;
  ColourChoice colour = ColourChoice::automatic;
  std::chrono::seconds timeout{0};  ///< of a process that waits for others; 0: none
};

/// The training step's numbers where they are to differ from the manifest's.
struct ScaleOptions {
  std::optional<double> max_norm;
  bool no_clip = false;
  std::optional<NormOrder> norm_type;
  std::optional<bool> pp;
  std::optional<std::string> pp_axis;
  std::optional<std::string> ep_axis;
  std::optional<std::int64_t> num_label_tokens;
  std::optional<std::int64_t> dp_group_size;
  std::optional<std::int64_t> expert_tp_replication_factor;
  std::optional<bool> foreach;
  std::optional<bool> use_torch_clip_grad_norm;
};

enum class Command : std::uint8_t {
  clip,
  norms,
  inspect,
  verify,
  diff,
  check,
  merge,
  synth,
  tokens,
  accumulate,
  report,
  doctor
};
[[nodiscard]] std::string_view name(Command command) noexcept;  ///< as it is typed

struct CommandLine {
  Command command = Command::doctor;
  std::filesystem::path dump;                     ///< of all but diff's B, synth and doctor; the JSON file of report
  std::vector<std::filesystem::path> more_dumps;  ///< norms --sweep, accumulate
  std::filesystem::path output;                   ///< clip, merge, synth, accumulate, report
  CommonOptions common;
  ScaleOptions scale;
  ClipOptions clip;                              ///< numerics is common.numerics
  TableOptions table;                            ///< norms
  std::vector<double> sweep;                     ///< norms: max_norms; empty: no sweep
  DiffLine diff;                                 ///< diff, whose A is `dump`
  CheckLine check;                               ///< check
  MergeLine merge;                               ///< merge
  LabelLine labels;                              ///< tokens, clip, norms, check
  AccumulateOptions accumulate;                  ///< accumulate
  std::optional<std::filesystem::path> checked;  ///< accumulate --check: compared by `diff`'s rule
  SynthOptions synth;                            ///< synth
  std::filesystem::path config;                  ///< --config; empty: none
  bool overwrite = false;
  bool verify = false;    ///< clip, norms: rank files against their recorded checksums first
  bool isolate = true;    ///< verify: rank files are checked in helper processes
  bool resume = false;    ///< clip
  bool paranoid = false;  ///< clip, synth, accumulate
  /// --help or --version was given: print this and exit with 0; the rest is not filled.
  std::optional<std::string> answer;
};

/// Errors: Error(usage) for whatever is wrong with the command line, the environment or the config file, with a value's
/// origin ("--max-norm", "GRADCLIP_MAX_NORM", "'max-norm' in run.json").
[[nodiscard]] CommandLine parse_command_line(int argc, const char* const* argv, const Environment& environment);

/// The recorded step with the options on top. Errors: Error(bad_input) for the manifest's values, Error(usage) for the
/// options'. @param complete  ManifestReading::complete: else an axis may be of a mesh that could not be read
[[nodiscard]] TrainingStep training_step(const Manifest& manifest, const ScaleOptions& options, bool complete = true);

/// "2.1.2"
[[nodiscard]] std::string cli11_version();

}  // namespace gradclip
