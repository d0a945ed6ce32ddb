#include "gradclip/norm/partial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

#include "gradclip/norm/addend_exchange.hpp"
#include "gradclip/norm/histograms.hpp"
#include "gradclip/norm/partial_slices.hpp"
#include "gradclip/norm/segments.hpp"

namespace gradclip {
namespace {

constexpr std::uint64_t kFewestElements = 1024;  // of a part of a chunk: less is slower to find than to read

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

/// An addend as its combiner finds it.
struct Arrival {
  AddendHeader header;
  std::size_t process = 0;  ///< that it came from
  std::size_t offset = 0;   ///< in what that process sent
};

class PartialCombination {
 public:
  /// @param normalizers  by parameter, for the reference's terms; empty: exact terms
  PartialCombination(Run& run, const FactorsOf& factors_of, NormOrder order, const Absences& absences,
                     std::span<const double> normalizers, HistogramCollector* histograms = nullptr)
      : run_(run),
        absences_(absences),
        manifest_(run.dump.manifest()),
        factors_of_(factors_of),
        request_{order, normalizers.empty() ? TermArithmetic::exact : TermArithmetic::reference},
        normalizers_(normalizers),
        histograms_(histograms),
        exchange_(run.backend, run.comm) {}

  std::vector<PartialSliceSum> combine(std::vector<TensorStatistics>& parameters) {
    slices_ = partial_slices(manifest_, absences_, /*of_gradients=*/normalizers_.empty());
    if (slices_.empty()) return {};
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < slices_.size(); ++i) {
      const std::uint64_t elements = slices_[i].layout.elements();
      const std::uint64_t most = most_elements(slices_[i]);
      if (most < std::min<std::uint64_t>(kChunkElements, elements)) {
        append_parts(segments, i, elements, most);
      } else {
        append_segments(segments, i, elements, chunks_per_segment(slices_[i].addends.size()));
      }
    }
    std::vector<TensorStatistics> of_slice(slices_.size());
    for (std::size_t begin = 0; begin < segments.size();) {
      std::size_t end = begin, bytes = 0;
      while (end < segments.size() && (end == begin || bytes < round_bytes(run_))) {
        const std::size_t addend = std::max(segments[end].elements * sizeof(double), AddendExchange::kAlignment);
        bytes += addend * slices_[segments[end].item].addends.size();
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
    std::vector<PartialSliceSum> sums;
    for (std::size_t i = 0; i < slices_.size(); ++i) {
      const PartialSlice& slice = slices_[i];
      if (of_slice[i].first_nonfinite != kNowhere) {
        const auto index = slice.layout.global_index(of_slice[i].first_nonfinite);
        of_slice[i].first_nonfinite = global_position(manifest_.parameters[slice.parameter].shape, index);
        of_slice[i].first_nonfinite_rank = slice.addends.front();
      }
      add(parameters[slice.parameter], of_slice[i], request_.order);
      sums.push_back({slice.parameter, slice.addends.front(), of_slice[i]});
    }
    return sums;
  }

 private:
  /// Few enough that a segment's addends, with the copies that travel, fit a round.
  [[nodiscard]] std::uint64_t chunks_per_segment(std::size_t addends) const {
    const std::size_t chunk_bytes = addends * kChunkElements * sizeof(double) * 4;
    return std::clamp<std::uint64_t>(round_bytes(run_) / chunk_bytes, 1, kMostChunksPerSegment);
  }

  /// Of how many elements a process can hold all addends at once: as they are read, and once more as they arrive.
  [[nodiscard]] std::uint64_t most_elements(const PartialSlice& slice) const {
    const std::size_t size = slice.addends.size() * size_of(manifest_.parameters[slice.parameter].dtype);
    const std::uint64_t elements = std::bit_floor(run_.stream.options().memory_budget / 4 / size);
    return std::clamp<std::uint64_t>(elements, kFewestElements, kChunkElements);
  }

  /// Segments are combined by the processes in turn, so that a single huge parameter keeps all of them busy.
  [[nodiscard]] int combiner(const Segment& segment) const {
    return static_cast<int>((segment.item + segment.first_chunk / kMostChunksPerSegment + segment.first_chunk) %
                            static_cast<std::size_t>(run_.comm.size()));
  }

  [[nodiscard]] DType dtype_of(const Segment& segment) const {
    return manifest_.parameters[slices_[segment.item].parameter].dtype;
  }

  /// What one addend of the segment takes on the road.
  [[nodiscard]] std::size_t addend_bytes(const Segment& segment) const {
    const std::size_t bytes = segment.elements * size_of(dtype_of(segment));
    return (bytes + AddendExchange::kAlignment - 1) / AddendExchange::kAlignment * AddendExchange::kAlignment;
  }

  std::vector<CombinedChunk> combine_round(std::span<const Segment> segments) {
    const auto processes = static_cast<std::size_t>(run_.comm.size());
    std::vector<std::vector<const Segment*>> of_combiner(processes);
    for (const Segment& segment : segments)
      of_combiner[static_cast<std::size_t>(combiner(segment))].push_back(&segment);

    std::vector<std::vector<AddendHeader>> headers(processes);
    const std::vector<std::size_t> send_counts = read_addends(of_combiner, headers);
    const auto their_headers = exchange_values(run_.comm, std::move(headers));

    // Every process sends its addends in the order of segments, then of ranks.
    const std::vector<const Segment*>& mine = of_combiner[static_cast<std::size_t>(run_.comm.process())];
    std::vector<std::size_t> receive_counts(processes, 0), header_at(processes, 0);
    std::vector<std::vector<Arrival>> arrivals;
    for (const Segment* segment : mine) {
      arrivals.emplace_back();
      for (const std::int32_t rank : slices_[segment->item].addends) {
        const auto from = static_cast<std::size_t>(run_.plan.process_of(rank));
        const AddendHeader& header = their_headers[from][header_at[from]++];
        arrivals.back().push_back({header, from, receive_counts[from]});
        if (header.none == 0) receive_counts[from] += addend_bytes(*segment);
      }
    }
    const Bytes received = exchange_.exchange(send_counts, receive_counts);
    std::vector<std::byte*> part_of(processes, received.data);
    for (std::size_t i = 1; i < processes; ++i) part_of[i] = part_of[i - 1] + receive_counts[i - 1];
    return gather_values(run_.comm, std::span<const CombinedChunk>(combine_all(mine, arrivals, part_of)));
  }

  /// An addend on its way from its file to its combiner.
  struct Reading {
    std::int32_t rank = 0;
    const Segment* segment = nullptr;
    std::size_t combiner = 0;
    std::size_t offset = 0;  ///< of its bytes in what is sent, if no addend before it is None
    AddendHeader header;
  };

  /// What this process's recorded ranks add to the segments, for each combiner one after another.
  [[nodiscard]] std::vector<Reading> list_readings(const std::vector<std::vector<const Segment*>>& of_combiner) const {
    std::vector<Reading> readings;
    std::size_t offset = 0;
    for (std::size_t i = 0; i < of_combiner.size(); ++i) {
      for (const Segment* segment : of_combiner[i]) {
        for (const std::int32_t rank : slices_[segment->item].addends) {
          if (run_.plan.process_of(rank) != run_.comm.process()) continue;
          readings.push_back({rank, segment, i, offset, {}});
          offset += addend_bytes(*segment);
        }
      }
    }
    return readings;
  }

  /// Reads them, rank by rank: there may be more files than can be open.
  /// @return bytes for each process
  std::vector<std::size_t> read_addends(const std::vector<std::vector<const Segment*>>& of_combiner,
                                        std::vector<std::vector<AddendHeader>>& headers) {
    std::vector<Reading> readings = list_readings(of_combiner);
    if (readings.empty()) return std::vector<std::size_t>(of_combiner.size(), 0);
    std::byte* const bytes = exchange_.outgoing(readings.back().offset + addend_bytes(*readings.back().segment));
    std::vector<std::size_t> by_rank(readings.size());
    std::iota(by_rank.begin(), by_rank.end(), std::size_t{0});
    std::stable_sort(by_rank.begin(), by_rank.end(),
                     [&](std::size_t a, std::size_t b) { return readings[a].rank < readings[b].rank; });
    for (const std::size_t i : by_rank) {
      readings[i].header = read_addend(*readings[i].segment, readings[i].rank, bytes + readings[i].offset);
    }
    std::vector<std::size_t> counts(of_combiner.size(), 0);
    std::byte* to = bytes;
    for (const Reading& reading : readings) {
      headers[reading.combiner].push_back(reading.header);
      if (reading.header.none != 0) continue;
      const std::size_t size = addend_bytes(*reading.segment);
      if (to != bytes + reading.offset) std::memmove(to, bytes + reading.offset, size);
      to += size;
      counts[reading.combiner] += size;
    }
    return counts;
  }

  AddendHeader read_addend(const Segment& segment, std::int32_t rank, std::byte* to) {
    const std::size_t parameter = slices_[segment.item].parameter;
    const auto file = run_.dump.rank_file(rank);
    const StoredShard& shard = file->locate(parameter);
    AddendHeader header{shard.none ? 1u : 0u, factors_of_(parameter, rank)};
    if (shard.scale_inv) header.factors.scale_inv = *shard.scale_inv;
    if (shard.none) return header;
    file->read(shard, segment.first_element, segment.elements, to);
    const std::size_t bytes = segment.elements * size_of(dtype_of(segment));
    std::memset(to + bytes, 0, addend_bytes(segment) - bytes);
    return header;
  }

  /// Combines and measures the segments; the device is waited for once, at the end.
  std::vector<CombinedChunk> combine_all(const std::vector<const Segment*>& segments,
                                         const std::vector<std::vector<Arrival>>& arrivals,
                                         const std::vector<std::byte*>& part_of) {
    std::size_t chunks = 0;
    for (const Segment* segment : segments) chunks += segment->chunks;
    const Buffer results =
        run_.backend.allocate(chunks * sizeof(ChunkStatistics), run_.backend.describe().working_space);
    std::vector<CombinedChunk> combined;
    std::size_t measured = 0;
    for (std::size_t i = 0; i < segments.size(); ++i) {
      Segment segment = *segments[i];
      Buffer values = combine_segment(segment, arrivals[i], part_of);
      if (begins_or_ends_within(segment)) {
        keep_part(segment, values);
        const std::uint64_t end = segment.first_element + segment.elements;
        segment = chunk_of(segment);
        if (end != segment.first_element + segment.elements) continue;
        values = std::exchange(chunk_, Buffer());
      }
      const bool none = values.data() == nullptr;
      if (!none) {
        measure(segment, values,
                results.bytes().subspan(measured * sizeof(ChunkStatistics), segment.chunks * sizeof(ChunkStatistics)));
        measured += segment.chunks;
        if (histograms_ != nullptr) count(segment, values);
      }
      for (std::uint64_t c = 0; c < segment.chunks; ++c) {
        combined.push_back({segment.item,
                            segment.first_element + c * kChunkElements,
                            static_cast<std::uint32_t>(chunk_elements(segment, c)),
                            none ? 1u : 0u,
                            {}});
      }
    }
    std::vector<ChunkStatistics> statistics(measured);
    const Bytes on_host = bytes_of(std::span(statistics));
    if (measured > 0) run_.backend.move(results.bytes().subspan(0, on_host.size), on_host);
    auto next = statistics.begin();
    for (CombinedChunk& chunk : combined) {
      if (chunk.none == 0) chunk.statistics = *next++;
    }
    return combined;
  }

  [[nodiscard]] std::uint64_t end_of_slice(const Segment& segment) const {
    return slices_[segment.item].layout.elements();
  }

  /// The whole chunk, or what there is of it, of which the segment is a part.
  [[nodiscard]] Segment chunk_of(const Segment& part) const {
    const std::uint64_t begin = part.first_chunk * kChunkElements;
    return {part.item, part.first_chunk, 1, begin, std::min<std::uint64_t>(kChunkElements, end_of_slice(part) - begin)};
  }

  [[nodiscard]] bool begins_or_ends_within(const Segment& segment) const {
    return segment.chunks == 1 && segment.elements != chunk_of(segment).elements;
  }

  /// Keeps a part's values until those of its whole chunk are there, in chunk_. The parts of a chunk come in order, and
  /// None in all or in none.
  void keep_part(const Segment& part, const Buffer& values) {
    if (values.data() == nullptr) return;
    const Segment chunk = chunk_of(part);
    if (chunk_.data() == nullptr) {
      chunk_ = run_.backend.allocate(chunk.elements * sizeof(double), run_.backend.describe().working_space);
    }
    const std::size_t bytes = part.elements * sizeof(double);
    run_.backend.move(values.bytes().subspan(0, bytes),
                      chunk_.bytes().subspan((part.first_element - chunk.first_element) * sizeof(double), bytes));
  }

  /// The segment's combined values in float64; empty where every addend is None.
  Buffer combine_segment(const Segment& segment, const std::vector<Arrival>& addends,
                         const std::vector<std::byte*>& part_of) {
    const PartialSlice& slice = slices_[segment.item];
    const ParameterEntry& entry = manifest_.parameters[slice.parameter];
    std::vector<ReductionStep> steps = reduction_steps(manifest_.meshes[*entry.mesh], entry.layout());
    if (steps.empty()) steps.push_back({PartialOperation::sum, 1});  // the parameter is Partial, its gradient is not
    check_addends(entry, slice, steps, addends);

    // Level 0: the addends where they arrived; then one float64 buffer per group of each step.
    std::vector<std::byte*> level;
    std::vector<ScaleFactors> factors;
    for (const Arrival& addend : addends) {
      level.push_back(addend.header.none != 0 ? nullptr : part_of[addend.process] + addend.offset);
      factors.push_back(addend.header.factors);
    }
    std::vector<Buffer> owned;
    DType dtype = entry.dtype;
    for (const ReductionStep& step : steps) {
      std::vector<Buffer> next;
      for (std::size_t group = 0; group < level.size() / step.fan_in; ++group) {
        next.push_back(reduce(segment, step, std::span(level).subspan(group * step.fan_in, step.fan_in),
                              std::span(factors).subspan(group * step.fan_in, step.fan_in), dtype));
      }
      owned = std::move(next);
      level.clear();
      for (const Buffer& buffer : owned) level.push_back(buffer.data());
      factors.assign(level.size(), ScaleFactors{});
      dtype = DType::float64;
    }
    return std::move(owned.front());
  }

  Buffer reduce(const Segment& segment, const ReductionStep& step, std::span<std::byte* const> addends,
                std::span<const ScaleFactors> factors, DType dtype) {
    std::vector<std::vector<Chunk>> chunks;
    std::vector<ChunkTable> tables;
    chunks.reserve(addends.size());
    for (std::size_t i = 0; i < addends.size(); ++i) {
      if (addends[i] == nullptr) continue;
      chunks.push_back(chunks_of(segment, addends[i], dtype));
      tables.push_back({chunks.back(), factors.subspan(i, 1)});
    }
    if (tables.empty()) return {};
    Buffer combined = run_.backend.allocate(segment.elements * sizeof(double), run_.backend.describe().working_space);
    run_.backend.combine(tables, step.operation, static_cast<double>(step.fan_in), combined.bytes());
    return combined;
  }

  /// @param out  one ChunkStatistics per chunk, in the working space
  void measure(const Segment& segment, const Buffer& combined, Bytes out) {
    const std::vector<Chunk> chunks = chunks_of(segment, combined.data(), DType::float64);
    ScaleFactors factors;
    if (normalizers_.empty()) {
      run_.backend.statistics({chunks, {&factors, 1}}, request_, out);
      return;
    }
    const std::size_t parameter = slices_[segment.item].parameter;
    const DType dtype = dtype_of(segment);
    const Buffer rounded =
        run_.backend.allocate(segment.elements * size_of(dtype), run_.backend.describe().working_space);
    const std::vector<Chunk> rounded_chunks = chunks_of(segment, rounded.data(), dtype);
    run_.backend.accumulate(rounded_chunks, {chunks, {&factors, 1}}, AccumulateStep::assign);
    factors.normalizer = normalizers_[parameter];
    factors.reference_in_float64 = manifest_.parameters[parameter].shape.empty();
    run_.backend.statistics({rounded_chunks, {&factors, 1}}, request_, out);
  }

  void count(const Segment& segment, const Buffer& combined) {
    const std::size_t parameter = slices_[segment.item].parameter;
    if (combined.bytes().space != MemorySpace::device) {
      histograms_->count(parameter, DType::float64, combined.data(), segment.elements);
      return;
    }
    std::vector<double> on_host(segment.elements);
    const Bytes to = bytes_of(std::span(on_host));
    run_.backend.move(combined.bytes().subspan(0, to.size), to);
    histograms_->count(parameter, DType::float64, to.data, segment.elements);
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
                     const std::vector<Arrival>& addends) const {
    for (const ReductionStep& step : steps) {
      const bool adds = step.operation == PartialOperation::sum || step.operation == PartialOperation::avg;
      for (std::size_t i = 0; i < addends.size(); ++i) {
        if (!adds && addends[i].header.none != 0) {
          throw Error(ExitCode::bad_input,
                      {.where = fmt::format("parameter {} on rank {}", quoted(entry.name), slice.addends[i]),
                       .found = "the gradient is None",
                       .expected = fmt::format("an addend of Partial({})", name(step.operation)),
                       .advice = "a missing addend counts as 0 for sum and avg only"});
        }
        if (step.operation == PartialOperation::product && changes_bits(addends[i].header.factors)) {
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
  HistogramCollector* histograms_;
  AddendExchange exchange_;
  std::vector<PartialSlice> slices_;
  Buffer chunk_;  ///< of a chunk that is combined in parts
};

}  // namespace

std::vector<PartialSliceSum> combine_partials(Run& run, const FactorsOf& factors_of, NormOrder order,
                                              const Absences& absences, std::vector<TensorStatistics>& parameters,
                                              HistogramCollector* histograms) {
  return PartialCombination(run, factors_of, order, absences, {}, histograms).combine(parameters);
}

std::vector<TensorStatistics> reference_terms_of_full_tensors(Run& run, const FactorsOf& factors_of, NormOrder order,
                                                              const Absences& absences,
                                                              std::span<const double> normalizers) {
  std::vector<TensorStatistics> parameters(run.dump.manifest().parameters.size());
  PartialCombination(run, factors_of, order, absences, normalizers).combine(parameters);
  return parameters;
}

}  // namespace gradclip
