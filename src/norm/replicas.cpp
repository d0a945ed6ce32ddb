#include "gradclip/norm/replicas.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "gradclip/base/precision.hpp"
#include "gradclip/norm/findings.hpp"
#include "gradclip/norm/segments.hpp"

namespace gradclip {
namespace {

/// How the values of two copies differ.
struct Difference {
  std::uint64_t first = kNowhere;  ///< position in the shard; in a Verdict in the global tensor
  double largest = 0.0;
  bool nan_counted = false, nan_other = false;  ///< that copy has a NaN where the other has a number
  /// What the other copy has where the counted one has a finite number: how many, and the first position.
  std::uint64_t nan = 0, inf = 0;
  std::uint64_t first_nonfinite = kNowhere;
};

/// Elements of one copy in host memory.
struct Values {
  const std::byte* bytes;
  float scale_inv;

  [[nodiscard]] double at(DType dtype, std::uint64_t i) const {
    const double stored = widen_through(dtype, bytes + i * size_of(dtype));
    return is_float8(dtype) ? static_cast<double>(static_cast<float>(stored) * scale_inv) : stored;
  }
};

void compare(Difference& difference, DType dtype, Values a, Values b, std::uint64_t count, std::uint64_t position) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const double x = a.at(dtype, i);
    const double y = b.at(dtype, i);
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    difference.first = std::min(difference.first, position + i);
    if (std::isfinite(x) && !std::isfinite(y)) {
      difference.first_nonfinite = std::min(difference.first_nonfinite, position + i);
      ++(std::isnan(y) ? difference.nan : difference.inf);
    }
    if (std::isnan(x)) {
      difference.nan_counted = true;
    } else if (std::isnan(y)) {
      difference.nan_other = true;
    } else {
      difference.largest = std::max(difference.largest, std::abs(x - y));
    }
  }
}

/// Which of one parameter's copies hold the same values, over all of its slices.
class AgreeingCopies {
 public:
  [[nodiscard]] bool knows_slice(std::int32_t counted) const { return slices_.count(counted) != 0; }
  /// @param declared  the copies of the slice, those that are not None
  void add_slice(std::int32_t counted, std::vector<std::int32_t> declared) {
    slices_[counted].declared = std::move(declared);
  }
  void differs(const Suspect& suspect) {
    slices_[suspect.rank].others[suspect.fingerprint].push_back(suspect.other_rank);
  }

  /// Empty where it goes without saying: two copies.
  [[nodiscard]] std::string text() const {
    constexpr std::size_t kMostSlices = 3, kMostClasses = 6;
    std::string text;
    std::size_t shown = 0;
    for (const auto& [counted, slice] : slices_) {
      if (slice.declared.size() < 3) continue;
      std::vector<std::vector<std::int32_t>> classes{slice.with_counted()};
      for (const auto& [fingerprint, ranks] : slice.others) classes.push_back(ranks);
      if (++shown > kMostSlices) return text + ", and so on in other slices";
      std::sort(classes.begin(), classes.end());
      std::vector<std::string> parts;
      for (const auto& ranks : classes) parts.push_back(named_ranks(ranks));
      if (parts.size() > kMostClasses) {
        parts.resize(kMostClasses);
        parts.push_back(fmt::format("{} more", classes.size() - kMostClasses));
      }
      text += fmt::format("{}{}", shown == 1 ? "; equal to one another: " : "; ", fmt::join(parts, " | "));
    }
    return text;
  }

 private:
  struct Slice {
    std::vector<std::int32_t> declared;
    std::map<std::uint64_t, std::vector<std::int32_t>> others;  // by fingerprint

    [[nodiscard]] std::vector<std::int32_t> with_counted() const {
      std::set<std::int32_t> differing;
      for (const auto& [fingerprint, ranks] : others) differing.insert(ranks.begin(), ranks.end());
      std::vector<std::int32_t> equal;
      for (const std::int32_t rank : declared) {
        if (differing.count(rank) == 0) equal.push_back(rank);
      }
      return equal;
    }
  };
  std::map<std::int32_t, Slice> slices_;  // by the copy that counts
};

/// NaN and infinities of one parameter's copies that do not count, where the one that counts has numbers: no sum sees
/// them.
class UncountedNonfinite {
 public:
  void add(const Suspect& suspect, const Difference& found) {
    if (found.first_nonfinite == kNowhere) return;
    nan_ += found.nan;
    inf_ += found.inf;
    ranks_.insert(suspect.other_rank);
    if (found.first_nonfinite < first_) {
      first_ = found.first_nonfinite;
      counted_ = suspect.rank;
    }
  }

  [[nodiscard]] bool any() const noexcept { return !ranks_.empty(); }

  [[nodiscard]] Finding finding(const ParameterEntry& entry) const {
    std::vector<std::int32_t> ranks(ranks_.begin(), ranks_.end());
    const std::string where = named_ranks(ranks);
    return {.kind = "nonfinite",
            .parameter = entry.name,
            .ranks = std::move(ranks),
            .index = index_at(entry.shape, first_),
            .value = static_cast<double>(nan_ + inf_),
            .message = fmt::format("{} NaN and {} infinities in copies that do not count, on {}, where the copy that "
                                   "counts (the first: rank {}'s) has numbers",
                                   nan_, inf_, where, counted_)};
  }

 private:
  std::uint64_t nan_ = 0, inf_ = 0, first_ = kNowhere;
  std::int32_t counted_ = 0;
  std::set<std::int32_t> ranks_;
};

/// A suspect's result as it travels. Trivially copyable.
struct Verdict {
  std::uint64_t suspect = 0;
  Difference difference;
};

class ReplicaComparison {
 public:
  ReplicaComparison(Run& run, const std::vector<Suspect>& suspects) : run_(run), suspects_(suspects) {}

  std::vector<Verdict> verdicts() {
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < suspects_.size(); ++i) append_segments(segments, i, suspects_[i].elements);
    for (std::size_t begin = 0; begin < segments.size();) {
      std::size_t end = begin, bytes = 0;
      while (end < segments.size() && (end == begin || bytes < round_bytes(run_))) {
        bytes += segments[end].elements * size_of(dtype(segments[end])) * 2;
        ++end;
      }
      compare_round({segments.data() + begin, end - begin});
      begin = end;
    }
    std::vector<Verdict> mine;
    for (const auto& [suspect, difference] : differences_)
      mine.push_back({suspect, in_global_position(suspect, difference)});
    return gather_values(run_.comm, std::span<const Verdict>(mine));
  }

 private:
  [[nodiscard]] DType dtype(const Segment& segment) const {
    return run_.dump.manifest().parameters[suspects_[segment.item].parameter].dtype;
  }
  [[nodiscard]] int home(const Segment& segment) const { return run_.plan.process_of(suspects_[segment.item].rank); }
  [[nodiscard]] int away(const Segment& segment) const {
    return run_.plan.process_of(suspects_[segment.item].other_rank);
  }

  /// The layout as it was recorded, which the process that read the shard knows.
  Difference in_global_position(std::uint64_t suspect, Difference difference) {
    const Suspect& of = suspects_[suspect];
    const auto place = [&](std::uint64_t& position) {
      if (position == kNowhere) return;
      const ShardLayout& layout = run_.dump.rank_file(of.rank)->locate(of.parameter).layout;
      position = global_position(run_.dump.manifest().parameters[of.parameter].shape, layout.global_index(position));
    };
    place(difference.first);
    place(difference.first_nonfinite);
    return difference;
  }

  /// A segment of one copy.
  struct Copy {
    std::vector<std::byte> bytes;
    float scale_inv = 1.0F;
  };

  Copy read(const Segment& segment, bool other) {
    const Suspect& suspect = suspects_[segment.item];
    const auto file = run_.dump.rank_file(other ? suspect.other_rank : suspect.rank);
    const StoredShard& shard = file->locate(other ? suspect.other_parameter : suspect.parameter);
    Copy copy{std::vector<std::byte>(segment.elements * size_of(dtype(segment))), shard.scale_inv.value_or(1.0F)};
    file->read(shard, segment.first_element, segment.elements, copy.bytes.data());
    return copy;
  }

  [[nodiscard]] std::uint64_t hash(const Segment& segment, const Copy& copy, std::uint64_t chunk) const {
    const std::size_t size = size_of(dtype(segment));
    return XXH3_64bits_withSeed(copy.bytes.data() + chunk * kChunkElements * size,
                                chunk_elements(segment, chunk) * size, std::bit_cast<std::uint32_t>(copy.scale_inv));
  }

  /// The counted copy's process sends its chunk hashes, the other copy's process answers with the chunks that differ.
  void compare_round(std::span<const Segment> segments) {
    const int me = run_.comm.process();
    const auto processes = static_cast<std::size_t>(run_.comm.size());
    std::vector<std::vector<std::uint64_t>> hashes(processes);
    for (const Segment& segment : segments) {
      if (home(segment) != me) continue;
      const Copy copy = read(segment, /*other=*/false);
      auto& outgoing = hashes[static_cast<std::size_t>(away(segment))];
      for (std::uint64_t c = 0; c < segment.chunks; ++c) outgoing.push_back(hash(segment, copy, c));
    }
    const std::vector<std::vector<std::uint64_t>> theirs = exchange_values(run_.comm, std::move(hashes));

    // For each segment a mask of the chunks that follow in `data`, and the copy's scale.
    struct Answer {
      std::uint64_t mask;
      float scale_inv;
      std::uint32_t reserved;
    };
    std::vector<std::vector<Answer>> answers(processes);
    std::vector<std::vector<std::byte>> data(processes);
    std::vector<std::size_t> taken(processes, 0);
    for (const Segment& segment : segments) {
      if (away(segment) != me) continue;
      const auto from = static_cast<std::size_t>(home(segment));
      const Copy copy = read(segment, /*other=*/true);
      std::uint64_t mask = 0;
      for (std::uint64_t c = 0; c < segment.chunks; ++c) {
        if (theirs[from][taken[from]++] == hash(segment, copy, c)) continue;
        mask |= std::uint64_t{1} << c;
        const std::size_t size = size_of(dtype(segment));
        const auto* first = copy.bytes.data() + c * kChunkElements * size;
        data[from].insert(data[from].end(), first, first + chunk_elements(segment, c) * size);
      }
      answers[from].push_back({mask, copy.scale_inv, 0});
    }
    const std::vector<std::vector<Answer>> their_answers = exchange_values(run_.comm, std::move(answers));
    const std::vector<std::vector<std::byte>> their_data = exchange_values(run_.comm, std::move(data));

    std::vector<std::size_t> answer_at(processes, 0), data_at(processes, 0);
    for (const Segment& segment : segments) {
      if (home(segment) != me) continue;
      const auto from = static_cast<std::size_t>(away(segment));
      const Answer answer = their_answers[from][answer_at[from]++];
      if (answer.mask == 0) continue;
      const Copy copy = read(segment, /*other=*/false);
      const std::size_t size = size_of(dtype(segment));
      for (std::uint64_t c = 0; c < segment.chunks; ++c) {
        if ((answer.mask >> c & 1) == 0) continue;
        const std::uint64_t count = chunk_elements(segment, c);
        compare(differences_[segment.item], dtype(segment),
                {copy.bytes.data() + c * kChunkElements * size, copy.scale_inv},
                {their_data[from].data() + data_at[from], answer.scale_inv}, count,
                segment.first_element + c * kChunkElements);
        data_at[from] += count * size;
      }
    }
  }

  Run& run_;
  const std::vector<Suspect>& suspects_;
  std::map<std::uint64_t, Difference> differences_;
};

static_assert(kMostChunksPerSegment <= 64, "a segment's chunks fit a mask");

}  // namespace

std::vector<Finding> compare_replicas(Run& run, const std::vector<Suspect>& suspects,
                                      const std::vector<AbsentCopy>& absent, const std::vector<bool>& expert) {
  const Manifest& manifest = run.dump.manifest();
  struct Merged {
    AgreeingCopies agreement;
    std::set<std::int32_t> none;
    std::set<std::int32_t> ranks;
    std::uint64_t first = kNowhere;
    std::int32_t first_rank = 0;
    double largest = 0.0;
    std::int32_t nan_rank = -1, number_rank = -1;  // a NaN met a number
    std::uint32_t counted = 0;
  };
  std::map<std::pair<std::uint32_t, bool>, Merged> by_parameter;  // and whether it is between tied entries
  std::map<std::uint32_t, UncountedNonfinite> uncounted;
  std::map<std::uint32_t, std::set<std::int32_t>> left_out;
  for (const AbsentCopy& copy : absent) {
    if (copy.left_out != 0) {
      left_out[copy.parameter].insert(copy.rank);
      continue;
    }
    Merged& merged = by_parameter[{copy.parameter, false}];
    merged.ranks.insert(copy.rank);
    merged.none.insert(copy.rank);
  }
  std::vector<Verdict> verdicts;
  if (!suspects.empty()) verdicts = ReplicaComparison(run, suspects).verdicts();
  std::sort(verdicts.begin(), verdicts.end(), [](const Verdict& a, const Verdict& b) { return a.suspect < b.suspect; });
  for (const Verdict& verdict : verdicts) {
    if (verdict.difference.first == kNowhere) continue;
    const Suspect& suspect = suspects[verdict.suspect];
    Merged& merged = by_parameter[{suspect.other_parameter, suspect.parameter != suspect.other_parameter}];
    merged.counted = suspect.parameter;
    merged.ranks.insert({suspect.rank, suspect.other_rank});
    if (suspect.parameter == suspect.other_parameter) {
      if (!merged.agreement.knows_slice(suspect.rank)) {
        const ParameterEntry& entry = manifest.parameters[suspect.parameter];
        std::vector<std::int32_t> copies = manifest.role(entry, suspect.rank, expert[suspect.parameter]).copies;
        const std::set<std::int32_t>& unread = left_out[suspect.parameter];
        std::erase_if(copies, [&](std::int32_t rank) { return unread.count(rank) + merged.none.count(rank) != 0; });
        merged.agreement.add_slice(suspect.rank, std::move(copies));
      }
      merged.agreement.differs(suspect);
    }
    const Difference& found = verdict.difference;
    merged.largest = std::max(merged.largest, found.largest);
    if (merged.nan_rank < 0 && (found.nan_counted || found.nan_other)) {
      merged.nan_rank = found.nan_other ? suspect.other_rank : suspect.rank;
      merged.number_rank = found.nan_other ? suspect.rank : suspect.other_rank;
    }
    if (suspect.parameter == suspect.other_parameter) uncounted[suspect.parameter].add(suspect, found);
    const std::uint64_t global = found.first;
    if (global < merged.first) {
      merged.first = global;
      merged.first_rank = suspect.other_rank;
    }
  }
  std::vector<Finding> findings;
  for (const auto& [parameter, of_copies] : uncounted) {
    if (of_copies.any()) findings.push_back(of_copies.finding(manifest.parameters[parameter]));
  }
  for (const auto& [key, merged] : by_parameter) {
    const auto& [parameter, tied] = key;
    const ParameterEntry& entry = manifest.parameters[parameter];
    Finding finding{.kind = tied ? "tied-differ" : "replicas-differ",
                    .parameter = entry.name,
                    .ranks = {merged.ranks.begin(), merged.ranks.end()},
                    .index = {},
                    .value = {},
                    .message = {}};
    if (merged.first != kNowhere) {
      finding.value = merged.nan_rank >= 0 ? std::numeric_limits<double>::quiet_NaN() : merged.largest;
      finding.index = index_at(manifest.parameters[merged.counted].shape, merged.first);
      finding.message = copies_differ(merged.largest, merged.nan_rank, merged.number_rank, merged.first_rank) +
                        merged.agreement.text();
    }
    if (!merged.none.empty()) {
      finding.message += fmt::format("{}the gradient is None on {} of the ranks that should hold copies of it",
                                     finding.message.empty() ? "" : "; ", merged.none.size());
    }
    findings.push_back(std::move(finding));
  }
  return findings;
}

std::vector<Suspect> tied_suspects(const Run& run, const ShardSums& sums, const ParameterFactors& factors,
                                   NormOrder order, std::vector<Finding>& findings) {
  const Manifest& manifest = run.dump.manifest();
  std::map<std::string, std::size_t> first_of;
  std::map<std::size_t, std::vector<const ShardResult*>> counted;
  for (const ShardResult& result : sums.tied) {
    const ParameterEntry& entry = manifest.parameters[result.parameter];
    const bool counts = is_counted_copy(manifest, entry, result.rank, factors.expert[result.parameter]);
    if (counts && result.none == 0) counted[result.parameter].push_back(&result);
  }
  std::vector<Suspect> suspects;
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    const ParameterEntry& entry = manifest.parameters[p];
    if (!entry.tied) continue;
    const auto [place, is_first] = first_of.emplace(*entry.tied, p);
    if (is_first) continue;
    const ParameterEntry& first = manifest.parameters[place->second];
    const auto& ours = counted[p];
    const auto& theirs = counted[place->second];
    const bool partial = entry.has_partial() || first.has_partial();  // addends say nothing by themselves
    bool same_cut =
        !partial && ours.size() == theirs.size() && entry.shape == first.shape && entry.dtype == first.dtype;
    for (std::size_t i = 0; same_cut && i < ours.size(); ++i) {
      const ShardLayout a = manifest.layout(entry, ours[i]->rank), b = manifest.layout(first, theirs[i]->rank);
      same_cut = a.ranges() == b.ranges() && a.flat() == b.flat();
    }
    if (same_cut) {
      for (std::size_t i = 0; i < ours.size(); ++i) {
        if (ours[i]->fingerprint == theirs[i]->fingerprint) continue;
        suspects.push_back({static_cast<std::uint32_t>(place->second), static_cast<std::uint32_t>(p), theirs[i]->rank,
                            ours[i]->rank, ours[i]->statistics.elements, ours[i]->fingerprint});
      }
      continue;
    }
    const TensorStatistics& a = sums.parameters[p];
    const TensorStatistics& b = sums.parameters[place->second];
    if (partial && (a.elements == 0 || b.elements == 0)) continue;  // not combined
    const double norm_a = a.norm(order), norm_b = b.norm(order);
    // Addends that are rounded one by one are another sum than one that is rounded once.
    const double limit = partial ? 4.0 * std::max(epsilon_of(entry.dtype), epsilon_of(first.dtype)) : 1e-12;
    const bool equal_norms =
        norm_a == norm_b || std::abs(norm_a - norm_b) <= limit * std::abs(norm_b) || a.nonfinite() != 0;
    const bool equal_values = a.zeros == b.zeros && a.max_abs == b.max_abs && a.min_abs == b.min_abs;
    const bool equal = entry.shape == first.shape && a.elements == b.elements && a.nan == b.nan &&
                       a.posinf == b.posinf && a.neginf == b.neginf && equal_norms && (partial || equal_values);
    if (equal) continue;
    findings.push_back(
        {.kind = "tied-differ",
         .parameter = entry.name,
         .ranks = manifest.holders(entry),
         .index = {},
         .value = std::abs(norm_a - norm_b),
         .message = fmt::format("entries of the tied weight {} differ: norm {:.9g} here, {:.9g} in the first",
                                quoted(*entry.tied), norm_a, norm_b)});
  }
  return suspects;
}

}  // namespace gradclip
