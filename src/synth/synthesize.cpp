#include "gradclip/synth/synthesize.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

#include "gradclip/analysis/global_runs.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/base/worker_pool.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/dump/new_rank_file.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/norm/shard_sums.hpp"
#include "gradclip/stream/work_plan.hpp"
#include "gradclip/synth/synthetic_values.hpp"
#include "gradclip/writing/joint_dump.hpp"

namespace gradclip {
namespace {

constexpr std::uint64_t kBlockElements = std::uint64_t{1} << 18;
constexpr std::uint64_t kOverheadBytes = std::uint64_t{1} << 16;  // of a rank file, at the least

[[noreturn]] void refuse_injection(std::string found, std::string expected) {
  throw Error(ExitCode::usage,
              {.where = "--inject", .found = std::move(found), .expected = std::move(expected), .advice = {}});
}

/// An injection that was found its place.
struct PlacedFault {
  InjectedKind kind = InjectedKind::nan;
  std::size_t parameter = 0;
  std::uint64_t position = 0;  ///< in the global tensor
  std::optional<std::int32_t> rank;
};

/// Whether the rank's copy is another one's too.
bool has_other_copies(const Manifest& manifest, const ParameterEntry& entry, std::int32_t rank) {
  return manifest.role(entry, rank, false).copies.size() > 1;
}

class FaultPlacer {
 public:
  FaultPlacer(const Manifest& manifest, const SynthOptions& options)
      : manifest_(manifest), options_(options), injection_(*options.injection) {}

  PlacedFault place() const {
    PlacedFault fault;
    fault.kind = injection_.kind;
    fault.parameter = parameter();
    const ParameterEntry& entry = manifest_.parameters[fault.parameter];
    const SyntheticTensor tensor(options_.seed, entry.name, options_.scale);
    fault.rank = injection_.rank;
    if (fault.rank && (*fault.rank < 0 || *fault.rank >= manifest_.world_size || !manifest_.holds(entry, *fault.rank) ||
                       manifest_.layout(entry, *fault.rank).elements() == 0)) {
      refuse_injection(fmt::format("rank {} holds nothing of {}", *fault.rank, quoted(entry.name)),
                       "a rank that holds a part of it");
    }
    if (fault.kind == InjectedKind::replica && !fault.rank) fault.rank = last_copy(entry);
    if (fault.kind == InjectedKind::replica && !(fault.rank && has_other_copies(manifest_, entry, *fault.rank))) {
      refuse_injection(fmt::format("{} has no copies{}", quoted(entry.name),
                                   fault.rank ? fmt::format(" of what rank {} holds", *fault.rank) : ""),
                       "a parameter of which several ranks hold copies; norms have them under tp, all under dp");
    }
    if (fault.rank) {
      const ShardLayout layout = manifest_.layout(entry, *fault.rank);
      fault.position = global_position(entry.shape, layout.global_index(tensor.pick(layout.elements())));
    } else {
      fault.position = tensor.pick(entry.elements);
    }
    return fault;
  }

 private:
  [[nodiscard]] std::size_t parameter() const {
    const std::vector<ParameterEntry>& parameters = manifest_.parameters;
    if (injection_.parameter) {
      const auto found = std::find_if(parameters.begin(), parameters.end(),
                                      [&](const ParameterEntry& entry) { return entry.name == *injection_.parameter; });
      if (found == parameters.end())
        refuse_injection("no parameter " + quoted(*injection_.parameter), "one of the model");
      return static_cast<std::size_t>(found - parameters.begin());
    }
    if (injection_.kind != InjectedKind::replica) return parameters.size() / 2;
    const auto found = std::find_if(parameters.begin(), parameters.end(),
                                    [&](const ParameterEntry& entry) { return last_copy(entry).has_value(); });
    if (found == parameters.end()) refuse_injection("no parameter has copies on this mesh", "a mesh with dp or tp");
    return static_cast<std::size_t>(found - parameters.begin());
  }

  [[nodiscard]] std::optional<std::int32_t> last_copy(const ParameterEntry& entry) const {
    const std::vector<std::int32_t> ranks = manifest_.holders(entry);
    for (auto rank = ranks.rbegin(); rank != ranks.rend(); ++rank) {
      if (has_other_copies(manifest_, entry, *rank) && manifest_.layout(entry, *rank).elements() != 0) return *rank;
    }
    return std::nullopt;
  }

  const Manifest& manifest_;
  const SynthOptions& options_;
  const Injection& injection_;
};

std::string describe(const PlacedFault& fault, const Manifest& manifest) {
  const ParameterEntry& entry = manifest.parameters[fault.parameter];
  return fmt::format("{} at {} [{}]{}",
                     fault.kind == InjectedKind::nan   ? "NaN"
                     : fault.kind == InjectedKind::inf ? "infinity"
                                                       : "a copy that differs",
                     entry.name, fmt::join(index_at(entry.shape, fault.position), ", "),
                     fault.rank ? fmt::format(" on rank {}", *fault.rank) : "");
}

class SyntheticWriter {
 public:
  SyntheticWriter(const Manifest& manifest, const SynthOptions& options, const std::optional<PlacedFault>& fault,
                  std::size_t threads, const SynthProgress& progress)
      : manifest_(manifest),
        options_(options),
        fault_(fault),
        threads_(threads),
        progress_(progress),
        buffers_(threads) {}

  WrittenRank write(std::int32_t rank, DumpWriter& writer) {
    std::vector<std::size_t> held;
    std::vector<ShardLayout> layouts;
    std::vector<NewGradient> gradients;
    for (std::size_t p = 0; p < manifest_.parameters.size(); ++p) {
      const ParameterEntry& entry = manifest_.parameters[p];
      if (!manifest_.holds(entry, rank)) continue;
      held.push_back(p);
      layouts.push_back(manifest_.layout(entry, rank));
      gradients.push_back({entry.dataset, layouts.back().local_shape(), entry.dtype, std::nullopt});
    }
    const std::filesystem::path path = writer.writing_directory() / manifest_.rank_file_name(rank);
    NewRankFile made(path, {rank, manifest_.world_size, manifest_.step}, gradients, {});
    const PosixFile file = PosixFile::open_for_writing(path, false);
    std::vector<std::uint64_t> checksums(held.size());
    parallel_for(held.size(), threads_, [&](std::size_t i, std::size_t worker) {
      checksums[i] = write_shard(held[i], rank, layouts[i], file, made.offsets()[i], buffers_[worker]);
    });
    return {rank, made.finish(checksums, writer.reads_back())};
  }

 private:
  std::uint64_t write_shard(std::size_t parameter, std::int32_t rank, const ShardLayout& layout, const PosixFile& file,
                            std::uint64_t offset, std::vector<std::byte>& buffer) const {
    const ParameterEntry& entry = manifest_.parameters[parameter];
    const SyntheticTensor tensor(options_.seed, entry.name, options_.scale);
    const std::size_t size = size_of(entry.dtype);
    const std::optional<std::uint64_t> faulty = faulty_element(parameter, rank, layout);
    Checksum checksum;
    for (std::uint64_t first = 0; first < layout.elements(); first += kBlockElements) {
      const std::uint64_t last = std::min(first + kBlockElements, layout.elements());
      buffer.resize((last - first) * size);
      const std::uint64_t begin = global_position(entry.shape, layout.global_index(first));
      std::byte* to = buffer.data();
      for (const StridedRun& run : global_runs(layout, entry.shape, first, last, begin)) {
        for (std::uint32_t i = 0; i < run.repeats; ++i) {
          tensor.fill(begin + run.offset + std::uint64_t{i} * run.stride, run.count, entry.dtype, to);
          to += run.count * size;
        }
      }
      if (faulty && *faulty >= first && *faulty < last) {
        store_element(faulty_value(tensor), entry.dtype, buffer.data() + (*faulty - first) * size);
      }
      checksum.update(buffer.data(), buffer.size());
      file.write(offset + first * size, buffer.data(), buffer.size());
      if (progress_.finish) progress_.finish(buffer.size());
    }
    return checksum.digest();
  }

  /// Where the fault is in the local shard, if it is there.
  [[nodiscard]] std::optional<std::uint64_t> faulty_element(std::size_t parameter, std::int32_t rank,
                                                            const ShardLayout& layout) const {
    if (!fault_ || fault_->parameter != parameter || (fault_->rank && *fault_->rank != rank)) return std::nullopt;
    const std::vector<std::int64_t>& shape = manifest_.parameters[parameter].shape;
    const std::uint64_t before = elements_before(layout, shape, fault_->position);
    const bool here = elements_before(layout, shape, fault_->position + 1) != before;
    return here ? std::optional(before) : std::nullopt;
  }

  [[nodiscard]] double faulty_value(const SyntheticTensor& tensor) const {
    if (fault_->kind == InjectedKind::nan) return std::numeric_limits<double>::quiet_NaN();
    if (fault_->kind == InjectedKind::inf) return std::numeric_limits<double>::infinity();
    return 2.0 * tensor.value(fault_->position) + options_.scale;  // what no rounding hides
  }

  const Manifest& manifest_;
  const SynthOptions& options_;
  const std::optional<PlacedFault>& fault_;
  std::size_t threads_;
  const SynthProgress& progress_;
  std::vector<std::vector<std::byte>> buffers_;
};

std::string manifest_of(const SynthOptions& options, const SynthResult& result,
                        const std::map<std::string, FileRecord>& files) {
  const Manifest& manifest = result.manifest;
  std::vector<std::string> entries;
  std::vector<std::string> meshes;
  for (const ParameterEntry& entry : manifest.parameters) {
    entries.push_back(parameter_text(entry, entry.mesh ? &manifest.meshes[*entry.mesh] : nullptr));
  }
  for (const DeviceMesh& mesh : manifest.meshes) meshes.push_back(mesh_text(mesh));
  std::vector<std::string> moe;
  for (const std::size_t mesh : manifest.moe_meshes) moe.push_back(fmt::format("\"{}\"", manifest.meshes[mesh].name()));
  const bool pipeline = manifest.meshes.front().dimension("pp").has_value();
  std::vector<std::string> sizes;
  for (const auto& [name, size] : options.mesh) sizes.push_back(fmt::format("{}={}", name, size));
  return manifest_text({
      {"format", "\"gradclip.dump\""},
      {"version", "1"},
      {"producer", fmt::format(R"({{"name":"gradclip synth","version":"{}"}})", GRADCLIP_VERSION)},
      {"step", "0"},
      {"microbatch", "null"},
      {"state", "\"before_clip\""},
      {"world_size", fmt::to_string(manifest.world_size)},
      {"rank_file", R"("rank_{rank:05d}.h5")"},
      {"meshes", fmt::format("{{\n{}}}", fmt::join(meshes, ",\n"))},
      {"device_mesh", "\"world\""},
      {"moe_mesh", moe.empty() ? "null" : fmt::format("[{}]", fmt::join(moe, ","))},
      {"parameters", parameters_text(entries)},
      {"training",
       fmt::format(R"({{"max_grad_norm":1.0,"norm_type":2.0,"pp_enabled":{},"pp_axis_name":"pp","ep_axis_name":"ep"}})",
                   pipeline)},
      {"synth", fmt::format(R"({{"model":{},"layers":{},"mesh":"{}","seed":{},"scale":{}}})", json_string(result.model),
                            result.layers, fmt::join(sizes, ","), options.seed, json_number(options.scale))},
      {"files", files_text(files)},
  });
}

/// Bytes of gradients in all rank files.
std::uint64_t bytes_of_gradients(const Manifest& manifest) {
  std::uint64_t bytes = 0;
  for (const ParameterEntry& entry : manifest.parameters) {
    for (const std::int32_t rank : manifest.holders(entry)) {
      bytes += manifest.layout(entry, rank).elements() * size_of(entry.dtype);
    }
  }
  return bytes;
}

void require_space(const std::filesystem::path& output, std::uint64_t bytes) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(output, error);
  const std::filesystem::space_info space = std::filesystem::space(absolute.parent_path(), error);
  if (error || space.available >= bytes) return;
  const auto gigabytes = [](std::uint64_t count) {
    return fmt::format("{:.1f} GB", static_cast<double>(count) * 1e-9);
  };
  throw Error(ExitCode::resources, {.where = "output " + output.string(),
                                    .found = gigabytes(space.available) + " are free there",
                                    .expected = gigabytes(bytes) + " for this model on this mesh",
                                    .advice = "--layers N cuts the model down"});
}

}  // namespace

namespace {

std::int64_t checked_layers(const SynthOptions& options, const ModelDescription& model) {
  if (options.layers.value_or(0) <= model.layers) return options.layers.value_or(model.layers);
  throw Error(ExitCode::usage, {.where = fmt::format("--layers {}", *options.layers),
                                .found = fmt::format("{} has {}", quoted(model.name), model.layers),
                                .expected = "at most as many: a model is cut down, never made longer",
                                .advice = {}});
}

}  // namespace

Injection parse_injection(const std::string& text) {
  Injection injection;
  const std::size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  if (kind == "nan") {
    injection.kind = InjectedKind::nan;
  } else if (kind == "inf") {
    injection.kind = InjectedKind::inf;
  } else if (kind == "replica") {
    injection.kind = InjectedKind::replica;
  } else {
    refuse_injection(quoted(text), "nan, inf or replica, then :PARAMETER and :RANK if wanted");
  }
  if (colon == std::string::npos) return injection;
  std::string rest = text.substr(colon + 1);
  if (const std::size_t last = rest.rfind(':'); last != std::string::npos) {
    std::int32_t rank = 0;
    const char* end = rest.data() + rest.size();
    const auto [parsed, error] = std::from_chars(rest.data() + last + 1, end, rank);
    if (error != std::errc() || parsed != end) refuse_injection(quoted(text), "a rank after the second colon");
    injection.rank = rank;
    rest.resize(last);
  }
  if (!rest.empty()) injection.parameter = rest;
  return injection;
}

SynthResult synthesize(Communicator& comm, const SynthOptions& options, std::size_t threads,
                       const std::filesystem::path& output, DumpWriter& writer, const SynthProgress& progress) {
  const ModelDescription model = read_model(options.model);
  SynthResult result;
  result.model = model.name;
  result.layers = checked_layers(options, model);
  result.manifest = synthetic_manifest(model, result.layers, options.mesh, options.dtype);
  const Manifest& manifest = result.manifest;
  for (const ParameterEntry& entry : manifest.parameters) result.elements += entry.elements;
  result.bytes = bytes_of_gradients(manifest);
  std::optional<PlacedFault> fault;
  if (options.injection) {
    fault = FaultPlacer(manifest, options).place();
    result.injected = describe(*fault, manifest);
  }
  if (comm.process() == 0) {
    require_space(output, result.bytes + static_cast<std::uint64_t>(manifest.world_size) * kOverheadBytes);
  }
  const auto write_mine = [&] {
    const WorkPlan plan = plan_work(manifest, comm.size());
    if (progress.begin) {
      const std::vector<double> of_ranks = bytes_by_rank(manifest);
      double mine = 0.0;
      for (const std::int32_t rank : plan.ranks(comm.process())) mine += of_ranks[static_cast<std::size_t>(rank)];
      progress.begin(mine);
    }
    SyntheticWriter ranks(manifest, options, fault, threads, progress);
    std::vector<WrittenRank> written;
    for (const std::int32_t rank : plan.ranks(comm.process())) {
      written.push_back(ranks.write(rank, writer));
    }
    return written;
  };
  write_jointly(comm, writer, manifest, {}, write_mine,
                [&](const std::map<std::string, FileRecord>& files) { return manifest_of(options, result, files); });
  return result;
}

}  // namespace gradclip
