#pragma once
// A dump made from a model's description, a mesh and a seed, without a training run: for tests, benchmarks and people
// who want to see what a command says.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/synth/synthetic_layout.hpp"

namespace gradclip {

enum class InjectedKind : std::uint8_t { nan, inf, replica };

/// A fault of one element, as --inject names it.
struct Injection {
  InjectedKind kind = InjectedKind::nan;
  std::optional<std::string> parameter;  ///< empty: the middle one in model order; for replica the first with copies
  std::optional<std::int32_t> rank;      ///< its copy alone; empty: all copies, for replica the last rank's
};

/// "nan", "inf:model.norm.weight", "replica:model.norm.weight:3". Errors: Error(usage).
[[nodiscard]] Injection parse_injection(const std::string& text);

struct SynthOptions {
  std::string model;
  std::optional<std::int64_t> layers;  ///< of the model's; empty: all
  MeshSizes mesh{{"dp_shard", 1}};
  DType dtype = DType::bfloat16;
  std::uint64_t seed = 0;
  double scale = 0.01;
  std::optional<Injection> injection;
};

/// What was written.
struct SynthResult {
  Manifest manifest;
  std::string model;
  std::int64_t layers = 0;
  std::uint64_t elements = 0;  ///< of the model
  std::uint64_t bytes = 0;     ///< of gradients in all rank files
  std::string injected;        ///< what and where, a sentence; empty: nothing
};

/// Who is told how far a process is.
struct SynthProgress {
  std::function<void(double bytes)> begin;          ///< what it is going to write
  std::function<void(std::uint64_t bytes)> finish;  ///< from any thread: these were written
};

/// Values are a function of seed, parameter and global index (synthetic_values.hpp), so that two layouts of one seed
/// hold the same gradient. Each process writes the files of its share of the ranks; the bytes are the same for any
/// number of processes. Collective. Errors: as read_model, synthetic_manifest, DumpWriter; Error(usage) for an
/// injection that names what there is not, and for more layers than the model has; Error(resources) where the file
/// system has less space than the dump needs.
/// @param output  where the dump goes, for the question of space
[[nodiscard]] SynthResult synthesize(Communicator& comm, const SynthOptions& options, std::size_t threads,
                                     const std::filesystem::path& output, DumpWriter& writer,
                                     const SynthProgress& progress = {});

}  // namespace gradclip
