#include "gradclip/norm/partial.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "gradclip/norm/segments.hpp"

namespace gradclip {
namespace {

/// One slice of a Partial parameter: the ranks whose addends make it up.
struct PartialSlice {
  std::size_t parameter = 0;
  std::vector<std::int32_t> addends;  ///< in coordinate order
  ShardLayout layout;
};

/// One reduction step, from the last Partial dimension to the first; equal operations in a row are one step over all of
/// their addends.
struct ReductionStep {
  PartialOperation operation = PartialOperation::sum;
  std::size_t fan_in = 1;
};

/// A chunk's statistics as they travel. Trivially copyable.
struct CombinedChunk {
  std::uint64_t slice = 0;
  std::uint64_t position = 0;
  std::uint32_t count = 0;
  std::uint32_t none = 0;  ///< 1: every addend was None
  ChunkStatistics statistics;
};

/// What precedes an addend's bytes. Trivially copyable.
struct AddendHeader {
  std::uint64_t none = 0;
  ScaleFactors factors;
};

bool has_partial_placement(const ParameterEntry& parameter) {
  return std::any_of(parameter.placements.begin(), parameter.placements.end(),
                     [](const Placement& placement) { return placement.kind == Placement::Kind::partial; });
}

std::vector<ReductionStep> reduction_steps(const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  std::vector<ReductionStep> steps;
  for (std::size_t d = placements.size(); d-- > 0;) {
    if (placements[d].kind != Placement::Kind::partial) continue;
    const auto extent = static_cast<std::size_t>(mesh.shape()[d]);
    if (!steps.empty() && steps.back().operation == placements[d].operation) {
      steps.back().fan_in *= extent;
    } else {
      steps.push_back({placements[d].operation, extent});
    }
  }
  return steps;
}

class PartialCombination {
 public:
  /// @param normalizers  by parameter, for the reference's terms; empty: exact terms
  PartialCombination(Run& run, const FactorsOf& factors_of, NormOrder order, const Absences& absences,
                     std::span<const double> normalizers)
      : run_(run),
        absences_(absences),
        manifest_(run.dump.manifest()),
        factors_of_(factors_of),
        request_{order, normalizers.empty() ? TermArithmetic::exact : TermArithmetic::reference},
        normalizers_(normalizers) {}

  void combine(std::vector<TensorStatistics>& parameters) {
    list_slices();
    if (slices_.empty()) return;
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < slices_.size(); ++i) {
      append_segments(segments, i, slices_[i].layout.elements(), chunks_per_segment(slices_[i].addends.size()));
    }
    std::vector<TensorStatistics> of_slice(slices_.size());
    for (std::size_t begin = 0; begin < segments.size();) {
      std::size_t end = begin, bytes = 0;
      while (end < segments.size() && (end == begin || bytes < round_bytes(run_))) {
        bytes += segments[end].elements * slices_[segments[end].item].addends.size() * sizeof(double);
        ++end;
      }
      std::vector<CombinedChunk> chunks = combine_round({segments.data() + begin, end - begin});
      std::sort(chunks.begin(), chunks.end(), [](const CombinedChunk& a, const CombinedChunk& b) {
        return std::pair(a.slice, a.position) < std::pair(b.slice, b.position);
      });
      for (const CombinedChunk& chunk : chunks) {
        if (chunk.none == 0) {
          append(of_slice[chunk.slice], chunk.statistics, chunk.count, chunk.position, request_.order);
        }
      }
      begin = end;
    }
    for (std::size_t i = 0; i < slices_.size(); ++i) {
      const PartialSlice& slice = slices_[i];
      if (of_slice[i].first_nonfinite != kNowhere) {
        const auto index = slice.layout.global_index(of_slice[i].first_nonfinite);
        of_slice[i].first_nonfinite = global_position(manifest_.parameters[slice.parameter].shape, index);
        of_slice[i].first_nonfinite_rank = slice.addends.front();
      }
      add(parameters[slice.parameter], of_slice[i], request_.order);
    }
  }

 private:
  /// Few enough that a segment's addends, with the copies that travel, fit a round.
  [[nodiscard]] std::uint64_t chunks_per_segment(std::size_t addends) const {
    const std::size_t chunk_bytes = addends * kChunkElements * sizeof(double) * 4;
    return std::clamp<std::uint64_t>(round_bytes(run_) / chunk_bytes, 1, kMostChunksPerSegment);
  }

  /// In manifest order, within a parameter in rank order of the first addend. The same on every process.
  void list_slices() {
    for (std::size_t p = 0; p < manifest_.parameters.size(); ++p) {
      const ParameterEntry& entry = manifest_.parameters[p];
      if (normalizers_.empty() ? !entry.has_partial() : !has_partial_placement(entry)) continue;
      for (const std::int32_t rank : manifest_.holders(entry)) {
        if (!begins_slice(entry, rank)) continue;
        std::vector<std::int32_t> addends = manifest_.role(entry, rank, /*expert=*/false).addends;
        bool any = false;
        for (std::int32_t& addend : addends) {
          addend = absences_.counted(p, addend);
          any = any || !absences_.is_none(p, addend);
        }
        if (any) slices_.push_back({p, std::move(addends), manifest_.layout(entry, rank)});
      }
    }
  }

  /// Whether the rank is at coordinate 0 of every Replicate and Partial dimension.
  [[nodiscard]] bool begins_slice(const ParameterEntry& entry, std::int32_t rank) const {
    const Coordinate at = manifest_.meshes[*entry.mesh].coordinate(rank);
    const std::vector<Placement>& placements = entry.layout();
    for (std::size_t d = 0; d < at.size(); ++d) {
      const Placement::Kind kind = placements[d].kind;
      if (at[d] != 0 && (kind == Placement::Kind::replicate || kind == Placement::Kind::partial)) return false;
    }
    return true;
  }

  /// Segments are combined by the processes in turn, so that a single huge parameter keeps all of them busy.
  [[nodiscard]] int combiner(const Segment& segment) const {
    return static_cast<int>((segment.item + segment.first_chunk / kMostChunksPerSegment + segment.first_chunk) %
                            static_cast<std::size_t>(run_.comm.size()));
  }

  [[nodiscard]] std::size_t segment_bytes(const Segment& segment) const {
    return segment.elements * size_of(manifest_.parameters[slices_[segment.item].parameter].dtype);
  }

  std::vector<CombinedChunk> combine_round(std::span<const Segment> segments) {
    const int me = run_.comm.process();
    const auto processes = static_cast<std::size_t>(run_.comm.size());
    std::vector<std::vector<AddendHeader>> headers(processes);
    std::vector<std::vector<std::byte>> data(processes);
    for (const Segment& segment : segments) {
      const PartialSlice& slice = slices_[segment.item];
      const auto to = static_cast<std::size_t>(combiner(segment));
      for (const std::int32_t rank : slice.addends) {
        if (run_.plan.process_of(rank) == me) send(segment, slice.parameter, rank, headers[to], data[to]);
      }
    }
    const auto their_headers = exchange_values(run_.comm, std::move(headers));
    const auto their_data = exchange_values(run_.comm, std::move(data));

    std::vector<CombinedChunk> mine;
    std::vector<std::size_t> header_at(processes, 0), data_at(processes, 0);
    for (const Segment& segment : segments) {
      if (combiner(segment) != me) continue;
      const PartialSlice& slice = slices_[segment.item];
      std::vector<AddendHeader> addends;
      std::vector<const std::byte*> bytes;
      for (const std::int32_t rank : slice.addends) {
        const auto from = static_cast<std::size_t>(run_.plan.process_of(rank));
        addends.push_back(their_headers[from][header_at[from]++]);
        bytes.push_back(addends.back().none != 0 ? nullptr : their_data[from].data() + data_at[from]);
        if (addends.back().none == 0) data_at[from] += segment_bytes(segment);
      }
      combine_segment(segment, addends, bytes, mine);
    }
    return gather_values(run_.comm, std::span<const CombinedChunk>(mine));
  }

  void send(const Segment& segment, std::size_t parameter, std::int32_t rank, std::vector<AddendHeader>& headers,
            std::vector<std::byte>& data) {
    const auto file = run_.dump.rank_file(rank);
    const StoredShard& shard = file->locate(parameter);
    AddendHeader header{shard.none ? 1u : 0u, factors_of_(parameter, rank)};
    if (shard.scale_inv) header.factors.scale_inv = *shard.scale_inv;
    headers.push_back(header);
    if (shard.none) return;
    const std::size_t at = data.size();
    data.resize(at + segment_bytes(segment));
    file->read(shard, segment.first_element, segment.elements, data.data() + at);
  }

  void combine_segment(const Segment& segment, const std::vector<AddendHeader>& addends,
                       const std::vector<const std::byte*>& bytes, std::vector<CombinedChunk>& out) {
    const PartialSlice& slice = slices_[segment.item];
    const ParameterEntry& entry = manifest_.parameters[slice.parameter];
    std::vector<ReductionStep> steps = reduction_steps(manifest_.meshes[*entry.mesh], entry.layout());
    if (steps.empty()) steps.push_back({PartialOperation::sum, 1});  // the parameter is Partial, its gradient is not
    check_addends(entry, slice, steps, addends);
    const MemorySpace space = run_.backend.describe().working_space;

    // Level 0: the addends in the backend's memory; then one float64 buffer per group of each step.
    std::vector<Buffer> level;
    std::vector<DType> dtypes;
    std::vector<ScaleFactors> factors;
    for (std::size_t i = 0; i < addends.size(); ++i) {
      level.emplace_back();
      dtypes.push_back(entry.dtype);
      factors.push_back(addends[i].factors);
      if (bytes[i] == nullptr) continue;
      level.back() = run_.backend.allocate(segment_bytes(segment), space);
      run_.backend.move({const_cast<std::byte*>(bytes[i]), segment_bytes(segment), MemorySpace::host},
                        level.back().bytes());
    }
    for (const ReductionStep& step : steps) {
      std::vector<Buffer> next;
      for (std::size_t group = 0; group < level.size() / step.fan_in; ++group) {
        next.push_back(reduce(segment, step, std::span(level).subspan(group * step.fan_in, step.fan_in),
                              std::span(factors).subspan(group * step.fan_in, step.fan_in), dtypes.front()));
      }
      level = std::move(next);
      dtypes.assign(level.size(), DType::float64);
      factors.assign(level.size(), ScaleFactors{});
    }
    measure(segment, level.front(), out);
  }

  Buffer reduce(const Segment& segment, const ReductionStep& step, std::span<const Buffer> addends,
                std::span<const ScaleFactors> factors, DType dtype) {
    std::vector<std::vector<Chunk>> chunks;
    std::vector<ChunkTable> tables;
    chunks.reserve(addends.size());
    for (std::size_t i = 0; i < addends.size(); ++i) {
      if (addends[i].data() == nullptr) continue;
      chunks.push_back(chunks_of(segment, addends[i].data(), dtype));
      tables.push_back({chunks.back(), factors.subspan(i, 1)});
    }
    if (tables.empty()) return {};
    Buffer combined = run_.backend.allocate(segment.elements * sizeof(double), run_.backend.describe().working_space);
    run_.backend.combine(tables, step.operation, static_cast<double>(step.fan_in), combined.bytes());
    return combined;
  }

  void measure(const Segment& segment, const Buffer& combined, std::vector<CombinedChunk>& out) {
    std::vector<ChunkStatistics> statistics(segment.chunks);
    const bool none = combined.data() == nullptr;
    if (!none && normalizers_.empty()) {
      measure_as(segment, combined.data(), DType::float64, {}, statistics);
    } else if (!none) {
      const std::size_t parameter = slices_[segment.item].parameter;
      const DType dtype = manifest_.parameters[parameter].dtype;
      ScaleFactors factors;
      factors.normalizer = normalizers_[parameter];
      factors.reference_in_float64 = manifest_.parameters[parameter].shape.empty();
      const Buffer rounded = rounded_to(dtype, combined, segment.elements);
      measure_as(segment, rounded.data(), dtype, factors, statistics);
    }
    for (std::uint64_t c = 0; c < segment.chunks; ++c) {
      out.push_back({segment.item, segment.first_element + c * kChunkElements,
                     static_cast<std::uint32_t>(chunk_elements(segment, c)), none ? 1u : 0u, statistics[c]});
    }
  }

  void measure_as(const Segment& segment, std::byte* data, DType dtype, const ScaleFactors& factors,
                  std::vector<ChunkStatistics>& statistics) {
    const std::vector<Chunk> chunks = chunks_of(segment, data, dtype);
    const std::size_t size = chunks.size() * sizeof(ChunkStatistics);
    const Buffer results = run_.backend.allocate(size, run_.backend.describe().working_space);
    run_.backend.statistics({chunks, {&factors, 1}}, request_, results.bytes().subspan(0, size));
    run_.backend.move(results.bytes().subspan(0, size),
                      {reinterpret_cast<std::byte*>(statistics.data()), size, MemorySpace::host});
  }

  /// Rounded on the host: full tensors of Partial parameters hardly ever occur, and no device function is worth it.
  Buffer rounded_to(DType dtype, const Buffer& combined, std::uint64_t elements) {
    std::vector<double> values(elements);
    run_.backend.move(combined.bytes().subspan(0, elements * sizeof(double)),
                      {reinterpret_cast<std::byte*>(values.data()), elements * sizeof(double), MemorySpace::host});
    std::vector<std::byte> narrow(elements * size_of(dtype));
    for (std::uint64_t i = 0; i < elements; ++i) store_through(dtype, values[i], narrow.data() + i * size_of(dtype));
    Buffer rounded = run_.backend.allocate(narrow.size(), run_.backend.describe().working_space);
    run_.backend.move({narrow.data(), narrow.size(), MemorySpace::host}, rounded.bytes().subspan(0, narrow.size()));
    return rounded;
  }

  static std::vector<Chunk> chunks_of(const Segment& segment, std::byte* data, DType dtype) {
    std::vector<Chunk> chunks;
    for (std::uint64_t c = 0; c < segment.chunks; ++c) {
      chunks.push_back({data + c * kChunkElements * size_of(dtype),
                        static_cast<std::uint32_t>(chunk_elements(segment, c)), dtype, 0});
    }
    return chunks;
  }

  void check_addends(const ParameterEntry& entry, const PartialSlice& slice, const std::vector<ReductionStep>& steps,
                     const std::vector<AddendHeader>& addends) const {
    for (const ReductionStep& step : steps) {
      const bool adds = step.operation == PartialOperation::sum || step.operation == PartialOperation::avg;
      for (std::size_t i = 0; i < addends.size(); ++i) {
        if (!adds && addends[i].none != 0) {
          throw Error(ExitCode::bad_input,
                      {.where = fmt::format("parameter {} on rank {}", quoted(entry.name), slice.addends[i]),
                       .found = "the gradient is None",
                       .expected = fmt::format("an addend of Partial({})", name(step.operation)),
                       .advice = "a missing addend counts as 0 for sum and avg only"});
        }
        if (step.operation == PartialOperation::product && changes_bits(addends[i].factors)) {
          throw Error(ExitCode::bad_input,
                      {.where = fmt::format("parameter {}", quoted(entry.name)),
                       .found = "Partial(product) that is to be scaled or clipped",
                       .expected = "sum, avg, max or min: a factor on each addend is not a factor on their product",
                       .advice = "use --no-scale, and norms instead of clip"});
        }
      }
    }
  }

  Run& run_;
  const Absences& absences_;
  const Manifest& manifest_;
  const FactorsOf& factors_of_;
  StatisticsRequest request_;
  std::span<const double> normalizers_;
  std::vector<PartialSlice> slices_;
};

}  // namespace

void combine_partials(Run& run, const FactorsOf& factors_of, NormOrder order, const Absences& absences,
                      std::vector<TensorStatistics>& parameters) {
  PartialCombination(run, factors_of, order, absences, {}).combine(parameters);
}

std::vector<TensorStatistics> reference_terms_of_full_tensors(Run& run, const FactorsOf& factors_of, NormOrder order,
                                                              const Absences& absences,
                                                              std::span<const double> normalizers) {
  std::vector<TensorStatistics> parameters(run.dump.manifest().parameters.size());
  PartialCombination(run, factors_of, order, absences, normalizers).combine(parameters);
  return parameters;
}

}  // namespace gradclip
