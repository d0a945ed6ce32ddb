#include "gradclip/training/label_tokens.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"

namespace gradclip {
namespace {

constexpr std::uint64_t kPiece = std::uint64_t{1} << 16;  // labels that are read at a time

// ---------------------------------------------------------------------------------------------------------------------
// Which ranks hold the same sequences
// ---------------------------------------------------------------------------------------------------------------------

struct BatchAxes {
  const DeviceMesh* mesh = nullptr;  ///< null: every rank has sequences of its own
  std::vector<bool> splits;          ///< by dimension of the mesh
  std::vector<std::string> names;
  std::uint64_t coordinates = 0;

  [[nodiscard]] std::uint64_t coordinate(std::int32_t rank) const {
    if (mesh == nullptr) return static_cast<std::uint64_t>(rank);
    const Coordinate at = mesh->coordinate(rank);
    std::uint64_t position = 0;
    for (std::size_t d = 0; d < at.size(); ++d) {
      if (splits[d])
        position = position * static_cast<std::uint64_t>(mesh->shape()[d]) + static_cast<std::uint64_t>(at[d]);
    }
    return position;
  }
};

std::string quoted_names(const std::vector<std::string>& names) {
  std::vector<std::string> texts;
  for (const std::string& one : names) texts.push_back(quoted(one));
  return fmt::format("{}", fmt::join(texts, ", "));
}

/// The device mesh, or the only one that there is.
const DeviceMesh* labels_mesh(const Manifest& manifest) {
  if (manifest.device_mesh) return &manifest.meshes[*manifest.device_mesh];
  if (manifest.meshes.size() == 1) return manifest.meshes.data();
  if (manifest.meshes.empty() || manifest.world_size == 1) return nullptr;
  throw Error(ExitCode::bad_input, {.where = "manifest.json, device_mesh",
                                    .found = fmt::format("none, of {} meshes", manifest.meshes.size()),
                                    .expected = "the one that tells which ranks hold the same labels",
                                    .advice = {}});
}

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

BatchAxes batch_axes(const Manifest& manifest, const LabelOptions& options) {
  BatchAxes axes;
  axes.mesh = labels_mesh(manifest);
  for (const std::string& name : options.dp_axes) {
    if (axes.mesh != nullptr && axes.mesh->dimension(name)) continue;
    throw Error(ExitCode::usage, {.where = "--dp-axes",
                                  .found = quoted(name),
                                  .expected = axes.mesh == nullptr ? "none: the dump has no device mesh"
                                                                   : "an axis of the device mesh: " +
                                                                         quoted_names(axes.mesh->dim_names()),
                                  .advice = {}});
  }
  if (axes.mesh == nullptr) {
    axes.coordinates = static_cast<std::uint64_t>(manifest.world_size);
    return axes;
  }
  axes.coordinates = 1;
  for (std::size_t d = 0; d < axes.mesh->dimensions(); ++d) {
    const std::string& name = axes.mesh->dim_names()[d];
    const std::int64_t extent = axes.mesh->shape()[d];
    const bool given = std::find(options.dp_axes.begin(), options.dp_axes.end(), name) != options.dp_axes.end();
    const bool known = is_one_of(name, {"dp", "dp_replicate", "dp_shard"});
    if (options.dp_axes.empty() && !known && extent > 1 && name != options.pp_axis_name &&
        !is_one_of(name, {"pp", "cp", "tp"})) {
      throw Error(ExitCode::bad_input,
                  {.where = fmt::format("manifest.json, mesh {}", quoted(axes.mesh->name())),
                   .found = fmt::format("the axis {}, along which labels may be the same or others", quoted(name)),
                   .expected = "dp, dp_replicate, dp_shard (others), pp, cp, tp (the same)",
                   .advice = "name the axes with other labels: --dp-axes"});
    }
    axes.splits.push_back(options.dp_axes.empty() ? known : given);
    if (!axes.splits.back()) continue;
    axes.names.push_back(name);
    axes.coordinates *= static_cast<std::uint64_t>(extent);
  }
  return axes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Each process counts its recorded ranks' labels
// ---------------------------------------------------------------------------------------------------------------------

/// One microbatch of a recorded rank. Travels between processes.
struct Counted {
  std::int32_t rank = 0;
  std::uint32_t microbatch = 0;
  std::int64_t batch = 0;
  std::int64_t sequence = 0;
  std::uint64_t label_tokens = 0;
  std::uint64_t tail_padding = 0;
  std::uint64_t hash = 0;  ///< of the labels' bytes

  [[nodiscard]] bool same_shape(const Counted& other) const noexcept {
    return batch == other.batch && sequence == other.sequence;
  }
  [[nodiscard]] LabelCounts counts() const noexcept {
    const auto sequences = static_cast<std::uint64_t>(batch);
    return {1, sequences, sequences * static_cast<std::uint64_t>(sequence), label_tokens, tail_padding};
  }
};

/// @param work  (labels of a piece, position of the first)
template <class Work>
void for_each_piece(const RankFile& file, std::size_t microbatch, std::uint64_t elements,
                    std::vector<std::int64_t>& room, const Work& work) {
  for (std::uint64_t first = 0; first < elements; first += kPiece) {
    room.resize(std::min(kPiece, elements - first));
    file.read_labels(microbatch, first, room.size(), room.data());
    work(std::span<const std::int64_t>(room), first);
  }
}

std::vector<Counted> count_mine(DumpReader& dump, std::span<const std::int32_t> ranks, const BatchAxes& axes,
                                std::int64_t ignore_index) {
  std::vector<Counted> mine;
  std::vector<std::int64_t> room;
  for (const std::int32_t rank : ranks) {
    const std::shared_ptr<const RankFile> file = dump.rank_file(rank);
    const std::vector<StoredLabels> labels = file->labels();
    if (!labels.empty() && axes.mesh != nullptr && !axes.mesh->contains(rank)) {
      throw Error(ExitCode::bad_input,
                  {.where = file->path().string() + ", /labels",
                   .found = fmt::format("labels of rank {}, which is not in mesh {}", rank, quoted(axes.mesh->name())),
                   .expected = "labels of ranks in it",
                   .advice = {}});
    }
    for (std::size_t k = 0; k < labels.size(); ++k) {
      LabelCounter counter(labels[k].sequence, ignore_index);
      Checksum hash;
      for_each_piece(*file, k, labels[k].elements(), room, [&](std::span<const std::int64_t> piece, std::uint64_t) {
        counter.add(piece);
        hash.update(piece.data(), piece.size_bytes());
      });
      mine.push_back({rank, static_cast<std::uint32_t>(k), labels[k].batch, labels[k].sequence, counter.label_tokens(),
                      counter.tail_padding(), hash.digest()});
    }
  }
  return mine;
}

// ---------------------------------------------------------------------------------------------------------------------
// Copies
// ---------------------------------------------------------------------------------------------------------------------

using Labels = std::span<const Counted>;  ///< of one rank, by microbatch

/// The ranks of a coordinate whose labels are not the counted rank's.
struct Suspects {
  Labels counted;
  Labels first;                     ///< of the lowest that differs
  std::vector<std::int32_t> ranks;  ///< ascending

  /// Whether only reading both tells how they differ.
  [[nodiscard]] bool differ_in_values() const {
    return std::equal(counted.begin(), counted.end(), first.begin(), first.end(),
                      [](const Counted& a, const Counted& b) { return a.same_shape(b); });
  }
};

bool are_equal(Labels a, Labels b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Counted& x, const Counted& y) { return x.same_shape(y) && x.hash == y.hash; });
}

/// Where two ranks' labels of the same shapes differ. Travels between processes.
struct ValueDifference {
  std::uint64_t coordinate = 0;
  std::uint64_t different = 0;
  std::int64_t microbatch = -1, row = 0, column = 0;  ///< of the first
  std::int64_t counted = 0, found = 0;                ///< there
};

ValueDifference compare(DumpReader& dump, std::uint64_t coordinate, const Suspects& suspects) {
  ValueDifference difference;
  difference.coordinate = coordinate;
  const auto a = dump.rank_file(suspects.counted[0].rank), b = dump.rank_file(suspects.first[0].rank);
  std::vector<std::int64_t> room, other;
  for (std::size_t k = 0; k < suspects.counted.size(); ++k) {
    const Counted& labels = suspects.counted[k];
    if (labels.hash == suspects.first[k].hash) continue;
    for_each_piece(*a, k, labels.counts().elements, room,
                   [&](std::span<const std::int64_t> piece, std::uint64_t first) {
                     other.resize(piece.size());
                     b->read_labels(k, first, other.size(), other.data());
                     for (std::size_t i = 0; i < piece.size(); ++i) {
                       if (piece[i] == other[i]) continue;
                       if (difference.different++ != 0) continue;
                       const auto at = static_cast<std::int64_t>(first + i);
                       difference.microbatch = static_cast<std::int64_t>(k);
                       difference.row = at / labels.sequence;
                       difference.column = at % labels.sequence;
                       difference.counted = piece[i];
                       difference.found = other[i];
                     }
                   });
  }
  return difference;
}

Finding finding_of(const Suspects& suspects, const ValueDifference* difference) {
  const std::int32_t counted = suspects.counted[0].rank, rank = suspects.first[0].rank;
  Finding finding{
      .kind = "labels-differ", .parameter = {}, .ranks = {counted}, .index = {}, .value = {}, .message = {}};
  finding.ranks.insert(finding.ranks.end(), suspects.ranks.begin(), suspects.ranks.end());
  std::string how;
  if (difference != nullptr) {
    finding.index = {difference->microbatch, difference->row, difference->column};
    finding.value = static_cast<double>(difference->different);
    how = fmt::format("{} of rank {}'s labels differ from rank {}'s: the first is {}, there {}", difference->different,
                      rank, counted, difference->found, difference->counted);
  } else if (suspects.counted.size() != suspects.first.size()) {
    how = fmt::format("rank {} has labels of {} microbatches, rank {} of {}", rank, suspects.first.size(), counted,
                      suspects.counted.size());
  } else {
    const auto [a, b] = std::mismatch(suspects.counted.begin(), suspects.counted.end(), suspects.first.begin(),
                                      [](const Counted& x, const Counted& y) { return x.same_shape(y); });
    how = fmt::format("rank {}'s labels of microbatch {} are [{}, {}], rank {}'s [{}, {}]", rank, a->microbatch,
                      b->batch, b->sequence, counted, a->batch, a->sequence);
  }
  finding.message = fmt::format("copies of one batch should be equal; {}; rank {}'s count", how, counted);
  return finding;
}

/// One finding for each coordinate. Collective.
void report_differences(DumpReader& dump, Communicator& comm, const WorkPlan& plan,
                        const std::map<std::uint64_t, Suspects>& suspects, std::vector<Finding>& findings) {
  std::vector<ValueDifference> mine;
  for (const auto& [coordinate, one] : suspects) {
    if (plan.process_of(one.first[0].rank) != comm.process() || !one.differ_in_values()) continue;
    mine.push_back(compare(dump, coordinate, one));
  }
  std::map<std::uint64_t, ValueDifference> differences;
  for (const ValueDifference& one : gather_values(comm, std::span<const ValueDifference>(mine))) {
    differences.emplace(one.coordinate, one);
  }
  for (const auto& [coordinate, one] : suspects) {
    const auto found = differences.find(coordinate);
    findings.push_back(finding_of(one, found != differences.end() ? &found->second : nullptr));
  }
}

void report_missing(const Manifest& manifest, const BatchAxes& axes, const std::map<std::uint64_t, Labels>& counted,
                    LabelTokens& result) {
  if (result.coordinates_counted == result.coordinates) return;
  Finding finding{.kind = "labels-missing", .parameter = {}, .ranks = {}, .index = {}, .value = {}, .message = {}};
  finding.value = static_cast<double>(result.coordinates - result.coordinates_counted);
  for (std::int32_t rank = 0; rank < manifest.world_size; ++rank) {
    if (axes.mesh != nullptr && !axes.mesh->contains(rank)) continue;
    if (counted.count(axes.coordinate(rank)) == 0) finding.ranks.push_back(rank);
  }
  finding.message = result.coordinates_counted == 0
                        ? std::string("the dump holds no labels")
                        : fmt::format("{} of {} data-parallel coordinates have no labels: the count leaves them out",
                                      result.coordinates - result.coordinates_counted, result.coordinates);
  result.findings.push_back(std::move(finding));
}

std::string microbatches_from(std::size_t first, std::size_t count) {
  return first + 1 == count ? fmt::format("microbatch {}", first)
                            : fmt::format("microbatches {} to {}", first, count - 1);
}

/// Coordinates whose counted rank has labels of fewer microbatches than another coordinate's.
void report_incomplete(const std::map<std::uint64_t, Labels>& counted, LabelTokens& result) {
  constexpr std::size_t kNamed = 4;
  const std::size_t most = result.by_microbatch.size();
  Finding finding{.kind = "labels-incomplete", .parameter = {}, .ranks = {}, .index = {}, .value = {}, .message = {}};
  std::vector<std::string> which;
  for (const auto& [coordinate, labels] : counted) {
    if (labels.size() == most) continue;
    finding.ranks.push_back(labels[0].rank);
    if (which.size() == kNamed) continue;
    which.push_back(fmt::format("coordinate {} (rank {}) has none of {}", coordinate, labels[0].rank,
                                microbatches_from(labels.size(), most)));
  }
  if (finding.ranks.empty()) return;
  result.coordinates_short = finding.ranks.size();
  if (which.size() < finding.ranks.size()) which.emplace_back("and so on");
  std::sort(finding.ranks.begin(), finding.ranks.end());
  finding.value = static_cast<double>(result.coordinates_short);
  finding.message = fmt::format("{} of {} data-parallel coordinates have labels of fewer than {} microbatches: {}",
                                result.coordinates_short, result.coordinates, most, fmt::join(which, ", "));
  result.findings.push_back(std::move(finding));
}

/// The step's own number, where it is about the same microbatches.
void report_recorded(const Manifest& manifest, LabelTokens& result) {
  const std::optional<std::int64_t> recorded = manifest.training.num_label_tokens;
  const bool whole_step = !manifest.microbatch || manifest.microbatch->count == 1;
  if (!recorded || !whole_step || !result.complete() ||
      *recorded == static_cast<std::int64_t>(result.total.label_tokens)) {
    return;
  }
  result.findings.push_back({.kind = "label-tokens",
                             .parameter = {},
                             .ranks = {},
                             .index = {},
                             .value = static_cast<double>(*recorded),
                             .message = fmt::format("the step recorded {} label tokens, its labels have {}", *recorded,
                                                    result.total.label_tokens)});
}

}  // namespace

LabelCounts& LabelCounts::operator+=(const LabelCounts& other) noexcept {
  microbatches += other.microbatches;
  sequences += other.sequences;
  elements += other.elements;
  label_tokens += other.label_tokens;
  tail_padding += other.tail_padding;
  return *this;
}

void LabelCounter::add(std::span<const std::int64_t> labels) noexcept {
  for (const std::int64_t label : labels) {
    if (label == ignore_index_) {
      ++run_;
    } else {
      run_ = 0;
      ++label_tokens_;
    }
    if (++column_ < sequence_) continue;
    tail_padding_ += run_;
    column_ = run_ = 0;
  }
}

std::uint64_t count_tail_padding(std::span<const std::int64_t> labels, std::span<const std::int64_t> shape,
                                 std::int64_t ignore_label) {
  const bool fits = shape.size() == 2 && shape[0] >= 0 && shape[1] >= 0 &&
                    StoredLabels{shape[0], shape[1]}.elements() == labels.size();
  if (!fits) {
    throw Error(ExitCode::bad_input, {.where = "labels",
                                      .found = fmt::format("{} of shape [{}]", labels.size(), fmt::join(shape, ", ")),
                                      .expected = "as many as a shape [batch, sequence] has",
                                      .advice = {}});
  }
  LabelCounter counter(shape[1], ignore_label);
  counter.add(labels);
  return counter.tail_padding();
}

LabelTokens count_label_tokens(DumpReader& dump, Communicator& comm, const WorkPlan& plan,
                               const LabelOptions& options) {
  const Manifest& manifest = dump.manifest();
  const BatchAxes axes = batch_axes(manifest, options);
  const std::vector<Counted> mine = count_mine(dump, plan.ranks(comm.process()), axes, options.ignore_index);
  std::vector<Counted> all = gather_values(comm, std::span<const Counted>(mine));
  std::stable_sort(all.begin(), all.end(), [](const Counted& a, const Counted& b) { return a.rank < b.rank; });

  LabelTokens result;
  result.ignore_index = options.ignore_index;
  result.dp_axes = axes.names;
  result.coordinates = axes.coordinates;
  std::map<std::uint64_t, Labels> counted;
  std::map<std::uint64_t, Suspects> suspects;
  for (auto begin = all.begin(); begin != all.end();) {
    const auto end = std::find_if(begin, all.end(), [&](const Counted& one) { return one.rank != begin->rank; });
    const Labels labels(begin, end);
    RankLabels& rank = result.ranks.emplace_back();
    rank.rank = begin->rank;
    rank.coordinate = axes.coordinate(rank.rank);
    const auto [place, is_new] = counted.emplace(rank.coordinate, labels);
    rank.counted = is_new;
    result.by_microbatch.resize(std::max(result.by_microbatch.size(), is_new ? labels.size() : 0));
    for (std::size_t k = 0; k < labels.size(); ++k) {
      rank.counts += labels[k].counts();
      if (is_new) result.by_microbatch[k] += labels[k].counts();
    }
    if (is_new) result.total += rank.counts;
    if (!is_new && !are_equal(place->second, labels)) {
      Suspects& one = suspects.try_emplace(rank.coordinate, Suspects{place->second, labels, {}}).first->second;
      one.ranks.push_back(rank.rank);
    }
    begin = end;
  }
  result.coordinates_counted = counted.size();
  result.total.microbatches = result.by_microbatch.size();
  for (LabelCounts& one : result.by_microbatch) one.microbatches = 1;

  report_differences(dump, comm, plan, suspects, result.findings);
  report_missing(manifest, axes, counted, result);
  report_incomplete(counted, result);
  report_recorded(manifest, result);
  return result;
}

}  // namespace gradclip
