#include "gradclip/training/accumulate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/base/worker_pool.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/dump/new_rank_file.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/stream/work_plan.hpp"
#include "gradclip/training/gradient_accumulator.hpp"

namespace gradclip {
namespace {

constexpr std::uint64_t kMostHeld = std::uint64_t{1} << 22;  // elements of all addends that a thread holds at a time

// ---------------------------------------------------------------------------------------------------------------------
// Which dumps belong together
// ---------------------------------------------------------------------------------------------------------------------

[[noreturn]] void refuse_dump(const DumpReader& dump, std::string found, std::string expected) {
  throw Error(ExitCode::bad_input, {.where = "microbatch " + quoted(dump.directory().string()),
                                    .found = std::move(found),
                                    .expected = std::move(expected),
                                    .advice = {}});
}

bool same_mesh(const Manifest& a, const ParameterEntry& of_a, const Manifest& b, const ParameterEntry& of_b) {
  if (of_a.mesh.has_value() != of_b.mesh.has_value()) return false;
  if (!of_a.mesh) return of_a.ranks == of_b.ranks && of_a.copies == of_b.copies;
  const DeviceMesh &x = a.meshes[*of_a.mesh], &y = b.meshes[*of_b.mesh];
  return x.ranks() == y.ranks() && x.shape() == y.shape() && x.dim_names() == y.dim_names();
}

void require_same_parameters(const DumpReader& first, const DumpReader& other) {
  const Manifest &a = first.manifest(), &b = other.manifest();
  if (a.world_size != b.world_size) {
    refuse_dump(other, fmt::format("{} ranks", b.world_size), fmt::format("{}, as in the first", a.world_size));
  }
  if (a.step != b.step) refuse_dump(other, "another step", "the first's");
  if (a.state != b.state) refuse_dump(other, fmt::format("the state {}", name(b.state)), std::string(name(a.state)));
  if (a.parameters.size() != b.parameters.size()) {
    refuse_dump(other, fmt::format("{} parameters", b.parameters.size()),
                fmt::format("{}, as in the first", a.parameters.size()));
  }
  for (std::size_t p = 0; p < a.parameters.size(); ++p) {
    const ParameterEntry &x = a.parameters[p], &y = b.parameters[p];
    if (x.name == y.name && x.dataset == y.dataset && x.shape == y.shape && x.dtype == y.dtype &&
        x.placements == y.placements && x.layout() == y.layout() && x.flat_ranges == y.flat_ranges &&
        same_mesh(a, x, b, y)) {
      continue;
    }
    refuse_dump(other, fmt::format("as parameter {} {}", p, quoted(y.name)),
                fmt::format("{} with the first's shape, type, mesh and placements", quoted(x.name)));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// How a parameter's addends become its gradient
// ---------------------------------------------------------------------------------------------------------------------

struct MeshReduction {
  PartialOperation operation = PartialOperation::avg;
  std::size_t ranks = 1;
};

struct ParameterPlan {
  ParameterEntry output;                  ///< as the output's manifest has it
  std::vector<MeshReduction> reductions;  ///< by Partial dimension, in mesh order
  std::vector<bool> varies;               ///< by mesh dimension: whether it is one of them

  /// The ranks whose gradients make up this rank's, in coordinate order.
  [[nodiscard]] std::vector<std::int32_t> addends(const Manifest& manifest, std::int32_t rank) const {
    if (reductions.empty()) return {rank};
    const DeviceMesh& mesh = manifest.meshes[*output.mesh];
    return mesh.ranks_along(varies, mesh.coordinate(rank));
  }
};

[[noreturn]] void refuse_parameter(const ParameterEntry& entry, std::string found, std::string expected) {
  throw Error(ExitCode::bad_input, {.where = "manifest.json, parameter " + quoted(entry.name),
                                    .found = std::move(found),
                                    .expected = std::move(expected),
                                    .advice = {}});
}

ParameterPlan plan_parameter(const Manifest& manifest, const ParameterEntry& entry, DType storage) {
  ParameterPlan plan;
  plan.output = entry;
  plan.output.gradient_placements.reset();
  plan.output.dtype = storage;
  if (!entry.mesh) {
    if (entry.ranks.size() > 1 && entry.copies != Copies::distinct) {
      refuse_parameter(entry, fmt::format("a plain tensor on {} ranks", entry.ranks.size()),
                       "one rank, \"distinct\" ones, or a mesh that tells which ranks are averaged");
    }
    return plan;
  }
  const DeviceMesh& mesh = manifest.meshes[*entry.mesh];
  for (std::size_t d = 0; d < mesh.dimensions(); ++d) {
    const Placement &recorded = entry.layout()[d], &kept = entry.placements[d];
    plan.varies.push_back(recorded != kept);
    if (recorded.kind == Placement::Kind::flat || kept.kind == Placement::Kind::flat) {
      refuse_parameter(entry, "a flat shard", "shards of whole dimensions");
    }
    if (recorded == kept) continue;
    const bool reducible = recorded.kind == Placement::Kind::partial &&
                           (recorded.operation == PartialOperation::avg || recorded.operation == PartialOperation::sum);
    if (!reducible) {
      refuse_parameter(
          entry, fmt::format("a gradient that is {} where the parameter is {}", to_string(recorded), to_string(kept)),
          "Partial(avg) or Partial(sum), or the parameter's placement");
    }
    plan.reductions.push_back({recorded.operation, static_cast<std::size_t>(mesh.shape()[d])});
  }
  return plan;
}

// ---------------------------------------------------------------------------------------------------------------------
// Where an element of a rank's shard lies in another rank's gradient
// ---------------------------------------------------------------------------------------------------------------------

/// @return position of the global index in the shard, and how many elements of the last dimension follow it there
std::pair<std::uint64_t, std::uint64_t> find_in(const ShardLayout& layout, const std::vector<std::int64_t>& index,
                                                const std::string& where) {
  std::uint64_t position = 0, following = 1;
  for (std::size_t d = 0; d < index.size(); ++d) {
    std::int64_t before = 0, found = -1;
    for (const IndexRange& range : layout.ranges()[d]) {
      if (index[d] >= range.begin && index[d] < range.end) {
        found = before + index[d] - range.begin;
        following = static_cast<std::uint64_t>(range.end - index[d]);
      }
      before += range.size();
    }
    if (found < 0) {
      throw Error(ExitCode::bad_input, {.where = where,
                                        .found = "it does not hold what another rank keeps of the sum",
                                        .expected = "a gradient of the parameter's slices",
                                        .advice = {}});
    }
    position = position * static_cast<std::uint64_t>(before) + static_cast<std::uint64_t>(found);
  }
  return {position, following};
}

/// Reads elements [first, first + count) of the shard `kept` from a gradient that holds them in its own order.
void read_slice(const RankFile& file, const StoredShard& shard, const ShardLayout& kept, std::uint64_t first,
                std::uint64_t count, std::byte* to) {
  const std::size_t size = size_of(shard.dtype);
  if (shard.layout.ranges() == kept.ranges()) {
    file.read(shard, first, count, to);
    return;
  }
  std::vector<RankFile::Piece> pieces;
  for (std::uint64_t i = 0; i < count;) {
    const std::vector<std::int64_t> index = kept.global_index(first + i);
    const std::string where = file.path().string() + ", " + printable(shard.dataset);
    const auto [position, run] = find_in(shard.layout, index, where);
    const std::uint64_t length = std::min({run, find_in(kept, index, where).second, count - i});
    RankFile::Piece* last = pieces.empty() ? nullptr : &pieces.back();
    if (last != nullptr && last->first + last->count == position) {
      last->count += length;
    } else {
      pieces.push_back({&shard, position, length, to + i * size});
    }
    i += length;
  }
  file.read(pieces);
}

// ---------------------------------------------------------------------------------------------------------------------
// The windows
// ---------------------------------------------------------------------------------------------------------------------

/// What one thread works with.
struct Bench {
  std::vector<GradientAccumulator> accumulators;  ///< one for each addend
  std::vector<std::byte> read;
  Buffer exact, rounded;
};

/// A finished rank file as it travels. Trivially copyable.
struct WrittenRank {
  std::int32_t rank = 0;
  std::uint32_t reserved = 0;
  std::uint64_t bytes = 0;
  std::uint64_t xxh3_64 = 0;
  std::uint64_t gradients = 0;  ///< bytes of them
};

class Replay {
 public:
  Replay(const std::vector<std::unique_ptr<DumpReader>>& dumps, Backend& backend, const AccumulateOptions& options,
         std::size_t threads, const std::function<void(std::uint64_t)>& progress)
      : dumps_(dumps),
        manifest_(dumps[0]->manifest()),
        backend_(backend),
        options_(options),
        progress_(progress),
        benches_(threads) {
    for (const ParameterEntry& entry : manifest_.parameters) {
      plans_.push_back(plan_parameter(manifest_, entry, options.storage_dtype.value_or(reduce_dtype(entry))));
    }
    for (Bench& bench : benches_) {
      bench.exact = backend.allocate(kChunkElements * sizeof(double), MemorySpace::host);
      bench.rounded = backend.allocate(kChunkElements * sizeof(double), MemorySpace::host);
    }
  }

  [[nodiscard]] const std::vector<ParameterPlan>& plans() const noexcept { return plans_; }

  WrittenRank write(std::int32_t rank, const std::filesystem::path& directory) {
    std::vector<std::size_t> held;
    std::vector<NewGradient> gradients;
    std::vector<std::string> none;
    for (std::size_t p = 0; p < plans_.size(); ++p) {
      const ParameterEntry& entry = plans_[p].output;
      if (!manifest_.holds(entry, rank)) continue;
      if (is_none(p, rank)) {
        none.push_back(entry.recorded_name());
        continue;
      }
      held.push_back(p);
      gradients.push_back({entry.dataset, manifest_.layout(entry, rank).local_shape(), entry.dtype, std::nullopt});
    }
    const std::filesystem::path path = directory / manifest_.rank_file_name(rank);
    NewRankFile made(path, {rank, manifest_.world_size, manifest_.step}, gradients, none);
    const PosixFile file = PosixFile::open_for_writing(path, false);
    std::vector<std::uint64_t> checksums(held.size());
    WrittenRank written{rank, 0, 0, 0, 0};
    for (const std::size_t p : held) {
      written.gradients += manifest_.layout(plans_[p].output, rank).elements() * size_of(plans_[p].output.dtype);
    }
    parallel_for(held.size(), benches_.size(), [&](std::size_t i, std::size_t worker) {
      checksums[i] = write_shard(held[i], rank, file, made.offsets()[i], benches_[worker]);
    });
    const FileRecord record = made.finish(checksums);
    written.bytes = record.bytes;
    written.xxh3_64 = record.xxh3_64.value_or(0);
    return written;
  }

 private:
  [[nodiscard]] DType reduce_dtype(const ParameterEntry& entry) const {
    return options_.reduce_dtype.value_or(entry.dtype == DType::float64 ? DType::float64 : DType::float32);
  }

  [[nodiscard]] bool is_none(std::size_t p, std::int32_t rank) {
    for (const std::int32_t addend : plans_[p].addends(manifest_, rank)) {
      for (const std::unique_ptr<DumpReader>& dump : dumps_) {
        if (!dump->rank_file(addend)->locate(p).none) return false;
      }
    }
    return true;
  }

  std::uint64_t write_shard(std::size_t p, std::int32_t rank, const PosixFile& file, std::uint64_t offset,
                            Bench& bench) {
    const ParameterPlan& plan = plans_[p];
    const ShardLayout kept = manifest_.layout(plan.output, rank);
    const std::vector<std::int32_t> addends = plan.addends(manifest_, rank);
    const DType reduce = reduce_dtype(manifest_.parameters[p]), storage = plan.output.dtype;
    bench.accumulators.clear();
    for (std::size_t i = 0; i < addends.size(); ++i) bench.accumulators.emplace_back(backend_, reduce);
    const std::uint64_t block = std::clamp<std::uint64_t>(kMostHeld / addends.size(), 256, kChunkElements);
    Checksum checksum;
    for (std::uint64_t first = 0; first < kept.elements(); first += block) {
      const std::uint64_t count = std::min(block, kept.elements() - first);
      for (std::size_t i = 0; i < addends.size(); ++i) {
        accumulate(p, addends[i], kept, first, count, bench.accumulators[i], bench.read);
      }
      const std::span<const std::byte> stored =
          reduced(plan, static_cast<std::uint32_t>(count), reduce, storage, bench);
      checksum.update(stored.data(), stored.size());
      file.write(offset + first * size_of(storage), stored.data(), stored.size());
    }
    return checksum.digest();
  }

  /// The training loop of one rank over these elements.
  void accumulate(std::size_t p, std::int32_t rank, const ShardLayout& kept, std::uint64_t first, std::uint64_t count,
                  GradientAccumulator& accumulator, std::vector<std::byte>& room) {
    accumulator.prepare_for_grad_accumulation();
    for (std::size_t k = 0; k < dumps_.size(); ++k) {
      if (k + 1 == dumps_.size()) accumulator.prepare_for_final_backward();
      const std::shared_ptr<const RankFile> file = dumps_[k]->rank_file(rank);
      const StoredShard& shard = file->locate(p);
      if (shard.none) {
        accumulator.backward_without_gradient();
      } else {
        room.resize(count * size_of(shard.dtype));
        read_slice(*file, shard, kept, first, count, room.data());
        accumulator.backward({room.data(), static_cast<std::uint32_t>(count), shard.dtype, 0},
                             shard.scale_inv.value_or(1.0F));
        if (progress_) progress_(room.size());
      }
      if (k == 0) accumulator.prepare_after_first_microbatch();
    }
  }

  /// The accumulators' gradients reduced, the last dimension first, and rounded to the storage type.
  std::span<const std::byte> reduced(const ParameterPlan& plan, std::uint32_t count, DType reduce, DType storage,
                                     Bench& bench) {
    std::vector<std::optional<Chunk>> left;
    for (const GradientAccumulator& one : bench.accumulators) {
      left.push_back(one.none() ? std::nullopt : std::optional(one.accumulated()));
    }
    for (auto step = plan.reductions.rbegin(); step != plan.reductions.rend(); ++step) {
      if (step->ranks == 1) continue;
      std::vector<std::optional<Chunk>> next;
      for (std::size_t group = 0; group < left.size(); group += step->ranks) {
        next.push_back(combined(std::span(left).subspan(group, step->ranks), *step, count, bench));
      }
      left = std::move(next);
    }
    const Chunk into{bench.rounded.data(), count, storage, 0};
    GRADCLIP_CHECK(left.size() == 1 && left[0] && left[0]->dtype == reduce, "a reduction without a result");
    assign(into, *left[0]);
    return {into.data, count * size_of(storage)};
  }

  /// In the place of the first addend that there is, which nobody needs any more.
  std::optional<Chunk> combined(std::span<const std::optional<Chunk>> group, const MeshReduction& step,
                                std::uint32_t count, Bench& bench) {
    const ScaleFactors unscaled;
    std::vector<Chunk> chunks;
    for (const std::optional<Chunk>& addend : group) {
      if (addend) chunks.push_back(*addend);
    }
    if (chunks.empty()) return std::nullopt;
    std::vector<ChunkTable> tables;
    for (const Chunk& chunk : chunks) tables.push_back({{&chunk, 1}, {&unscaled, 1}});
    backend_.combine(tables, step.operation, static_cast<double>(step.ranks),
                     {bench.exact.data(), count * sizeof(double), MemorySpace::host});
    assign(chunks[0], {bench.exact.data(), count, DType::float64, 0});
    return chunks[0];
  }

  void assign(const Chunk& into, const Chunk& from) {
    const ScaleFactors unscaled;
    backend_.accumulate({&into, 1}, {{&from, 1}, {&unscaled, 1}}, AccumulateStep::assign);
    backend_.wait(UnusedMemory::keep);
  }

  const std::vector<std::unique_ptr<DumpReader>>& dumps_;
  const Manifest& manifest_;
  Backend& backend_;
  const AccumulateOptions& options_;
  const std::function<void(std::uint64_t)>& progress_;
  std::vector<ParameterPlan> plans_;
  std::vector<Bench> benches_;
};

std::string manifest_of(const DumpReader& first, const std::vector<ParameterPlan>& plans,
                        const AccumulateOptions& options, std::size_t microbatches,
                        const std::map<std::string, FileRecord>& files) {
  const Manifest& manifest = first.manifest();
  std::vector<std::string> entries;
  for (const ParameterPlan& plan : plans) {
    entries.push_back(parameter_text(plan.output, plan.output.mesh ? &manifest.meshes[*plan.output.mesh] : nullptr));
  }
  const auto type = [](const std::optional<DType>& dtype) {
    return dtype ? fmt::format("\"{}\"", name(*dtype)) : std::string("null");
  };
  return edited_manifest(
      first.directory(),
      {{"microbatch", "null"},
       {"parameters", parameters_text(entries)},
       {"files", files_text(files)},
       {"accumulate", fmt::format(R"({{"microbatches":{},"reduce_dtype":{},"dtype":{}}})", microbatches,
                                  type(options.reduce_dtype), type(options.storage_dtype))}});
}

}  // namespace

void order_microbatches(std::vector<std::unique_ptr<DumpReader>>& dumps) {
  std::vector<const DumpReader*> by_index(dumps.size(), nullptr);
  for (const std::unique_ptr<DumpReader>& dump : dumps) {
    const auto& microbatch = dump->manifest().microbatch;
    if (!microbatch) refuse_dump(*dump, "no \"microbatch\" in its manifest", "the gradients of one microbatch");
    if (microbatch->second != static_cast<std::int64_t>(dumps.size())) {
      refuse_dump(*dump, fmt::format("microbatch {} of {}", microbatch->first, microbatch->second),
                  fmt::format("one of the {} that are given: a window that does not end in a reduction is no gradient",
                              dumps.size()));
    }
    const DumpReader*& place = by_index.at(static_cast<std::size_t>(microbatch->first));
    if (place != nullptr) {
      refuse_dump(*dump, fmt::format("microbatch {}, as {}", microbatch->first, quoted(place->directory().string())),
                  "each microbatch once");
    }
    place = dump.get();
    if (dump != dumps.front()) require_same_parameters(*dumps.front(), *dump);
  }
  std::sort(dumps.begin(), dumps.end(), [](const auto& a, const auto& b) {
    return a->manifest().microbatch->first < b->manifest().microbatch->first;
  });
}

AccumulateResult accumulate_microbatches(const std::vector<std::unique_ptr<DumpReader>>& dumps, Communicator& comm,
                                         Backend& backend, const AccumulateOptions& options, std::size_t threads,
                                         DumpWriter& writer, const std::function<void(std::uint64_t)>& progress) {
  GRADCLIP_CHECK(!dumps.empty() && backend.describe().working_space == MemorySpace::host, "no host memory to work in");
  const Manifest& manifest = dumps[0]->manifest();
  Replay replay(dumps, backend, options, threads, progress);
  AccumulateResult result;
  result.microbatches = dumps.size();
  for (const ParameterPlan& plan : replay.plans()) result.reduced += plan.reductions.empty() ? 0 : 1;
  const bool first = comm.process() == 0;
  try {
    if (first) writer.prepare();
    comm.barrier();
    const WorkPlan plan = plan_work(manifest, comm.size());
    std::vector<WrittenRank> mine;
    try {
      for (const std::int32_t rank : plan.ranks(comm.process())) {
        mine.push_back(replay.write(rank, writer.writing_directory()));
      }
    } catch (const Error&) {
      rethrow_unless_given_up(writer.writing_directory());
    }
    std::map<std::string, FileRecord> files;
    for (const WrittenRank& written : gather_values(comm, std::span<const WrittenRank>(mine))) {
      files[manifest.rank_file_name(written.rank)] = {written.bytes, written.xxh3_64};
      result.bytes += written.gradients;
    }
    if (first) writer.finish_with(manifest_of(*dumps[0], replay.plans(), options, dumps.size(), files));
    comm.barrier();
  } catch (...) {
    // The process that fails may be the last one alive: it removes what all of them have written.
    writer.discard();
    throw;
  }
  return result;
}

}  // namespace gradclip
