#include "gradclip/verify/reduction_hints.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "gradclip/base/precision.hpp"
#include "gradclip/norm/segments.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostParameters = 100;
constexpr std::size_t kMostCopies = 64;

/// The copies of one slice of a parameter.
struct CopyGroup {
  std::uint32_t parameter = 0;
  std::vector<std::int32_t> ranks;  ///< the counted copy first
  std::uint64_t elements = 0;
};

/// What is still possible after the elements seen so far.
class Candidates {
 public:
  Candidates(std::vector<std::int32_t> ranks, DType dtype)
      : ranks_(std::move(ranks)),
        slack_(epsilon_of(dtype)),  // twice what rounding the copies and their sum can make of it
        is_zero_(ranks_.size(), true),
        is_sum_(ranks_.size(), ranks_.size() > 2),
        is_mean_(is_sum_),
        is_multiple_(ranks_.size(), true),
        is_part_(ranks_.size(), true) {}

  /// One element of every copy, in the order of ranks.
  void see(const std::vector<double>& values) {
    const auto n = static_cast<double>(values.size());
    double sum = 0.0, magnitudes = 0.0;
    for (const double value : values) {
      sum += value;
      magnitudes += std::abs(value);
    }
    if (magnitudes == 0.0) return;
    seen_ = true;
    const double slack = slack_ * magnitudes;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double others = sum - values[i];
      is_zero_[i] = is_zero_[i] && values[i] == 0.0;
      const auto holds = [&](double a, double b) { return std::abs(a - b) <= slack; };  // false for NaN
      is_sum_[i] = is_sum_[i] && holds(values[i], others);
      is_mean_[i] = is_mean_[i] && holds(values[i], others / (n - 1.0));
      is_multiple_[i] = is_multiple_[i] && holds(values[i], n * values[0]);
      is_part_[i] = is_part_[i] && holds(n * values[i], values[0]);
    }
  }

  [[nodiscard]] bool any() const {
    const auto open = [](const std::vector<bool>& of, std::size_t from) {
      return std::find(of.begin() + static_cast<std::ptrdiff_t>(from), of.end(), true) != of.end();
    };
    return open(is_zero_, 0) || open(is_sum_, 0) || open(is_mean_, 0) || open(is_multiple_, 1) || open(is_part_, 1);
  }

  /// One sentence, or nothing.
  [[nodiscard]] std::string text() const {
    if (!seen_) return {};
    // With a copy of zeros another one is soon the sum of the rest.
    if (const auto zero = std::find(is_zero_.begin(), is_zero_.end(), true); zero != is_zero_.end()) {
      return fmt::format("rank {} holds nothing but zeros", ranks_[static_cast<std::size_t>(zero - is_zero_.begin())]);
    }
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (is_sum_[i]) {
        return fmt::format("rank {} holds the sum of the other copies: an all-reduce is missing on them", ranks_[i]);
      }
    }
    // Of copies a, 2a, 3a, 6a one is the mean of the others, too.
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (is_mean_[i]) {
        return fmt::format("rank {} holds the mean of the other copies: an all-reduce is missing on them", ranks_[i]);
      }
    }
    for (std::size_t i = 1; i < ranks_.size(); ++i) {
      const char* form =
          "rank {} holds {} times what rank {} holds, as if one had summed over the {} copies and the "
          "other averaged";
      if (is_multiple_[i]) {
        return fmt::format(fmt::runtime(form), ranks_[i], ranks_.size(), ranks_[0], ranks_.size());
      }
      if (is_part_[i]) return fmt::format(fmt::runtime(form), ranks_[0], ranks_.size(), ranks_[i], ranks_.size());
    }
    return {};
  }

 private:
  std::vector<std::int32_t> ranks_;
  double slack_;
  bool seen_ = false;
  std::vector<bool> is_zero_;
  std::vector<bool> is_sum_, is_mean_;       // of all other copies
  std::vector<bool> is_multiple_, is_part_;  // the number of copies times the first copy, or the first copy of it
};

/// Sends every copy's elements to the process of the counted copy, which looks at them.
class GroupComparison {
 public:
  GroupComparison(Run& run, const CopyGroup& group)
      : run_(run), group_(group), dtype_(run.dump.manifest().parameters[group.parameter].dtype) {}

  /// @return in the counted copy's process the sentence, elsewhere nothing
  std::string hint() {
    Candidates candidates(group_.ranks, dtype_);
    std::vector<Segment> segments;
    append_segments(segments, 0, group_.elements, 1);
    for (const Segment& segment : segments) {
      look_at(segment, candidates);
      const bool open = !is_home() || candidates.any();
      if (gather_value(run_.comm, char{open})[static_cast<std::size_t>(home())] == 0) return {};
    }
    return is_home() ? candidates.text() : std::string();
  }

  [[nodiscard]] int home() const { return run_.plan.process_of(group_.ranks[0]); }

 private:
  [[nodiscard]] bool is_home() const { return run_.comm.process() == home(); }

  void look_at(const Segment& segment, Candidates& candidates) {
    const std::vector<std::vector<double>> arrived = exchange(segment);
    if (!is_home()) return;
    std::vector<std::size_t> at(arrived.size(), 0);
    std::vector<const double*> copies;
    for (const std::int32_t rank : group_.ranks) {
      const auto from = static_cast<std::size_t>(run_.plan.process_of(rank));
      copies.push_back(arrived[from].data() + at[from]);
      at[from] += segment.elements;
    }
    std::vector<double> values(copies.size());
    for (std::uint64_t i = 0; i < segment.elements && candidates.any(); ++i) {
      for (std::size_t c = 0; c < copies.size(); ++c) values[c] = copies[c][i];
      candidates.see(values);
    }
  }

  std::vector<std::vector<double>> exchange(const Segment& segment) {
    std::vector<std::vector<double>> outgoing(static_cast<std::size_t>(run_.comm.size()));
    std::vector<double>& to = outgoing[static_cast<std::size_t>(home())];
    std::vector<std::byte> bytes(segment.elements * size_of(dtype_));
    for (const std::int32_t rank : group_.ranks) {
      if (run_.plan.process_of(rank) != run_.comm.process()) continue;
      const auto file = run_.dump.rank_file(rank);
      const StoredShard& shard = file->locate(group_.parameter);
      file->read(shard, segment.first_element, segment.elements, bytes.data());
      const double scale = shard.scale_inv.value_or(1.0F);
      for (std::uint64_t i = 0; i < segment.elements; ++i) {
        to.push_back(widen_through(dtype_, bytes.data() + i * size_of(dtype_)) * scale);
      }
    }
    return exchange_values(run_.comm, std::move(outgoing));
  }

  Run& run_;
  const CopyGroup& group_;
  DType dtype_;
};

std::vector<CopyGroup> first_groups(const Manifest& manifest, const std::vector<Suspect>& suspects,
                                    const std::vector<AbsentCopy>& absent, const std::vector<bool>& expert) {
  std::vector<CopyGroup> groups;
  for (const Suspect& suspect : suspects) {
    if (!groups.empty() && groups.back().parameter == suspect.parameter) continue;
    if (groups.size() == kMostParameters) break;
    CopyGroup group{suspect.parameter, {suspect.rank}, suspect.elements};
    const ParameterEntry& entry = manifest.parameters[suspect.parameter];
    for (const std::int32_t rank : manifest.role(entry, suspect.rank, expert[suspect.parameter]).copies) {
      const bool none = std::binary_search(absent.begin(), absent.end(), AbsentCopy{suspect.parameter, rank});
      if (rank != suspect.rank && !none) group.ranks.push_back(rank);
    }
    groups.push_back(std::move(group));
  }
  std::erase_if(groups, [](const CopyGroup& group) { return group.ranks.size() > kMostCopies; });
  return groups;
}

}  // namespace

std::map<std::uint32_t, std::string> reduction_hints(Run& run, const std::vector<Suspect>& suspects,
                                                     const std::vector<AbsentCopy>& absent,
                                                     const std::vector<bool>& expert) {
  std::map<std::uint32_t, std::string> hints;
  for (const CopyGroup& group : first_groups(run.dump.manifest(), suspects, absent, expert)) {
    GroupComparison comparison(run, group);
    const std::string mine = comparison.hint();
    const std::vector<char> text = gather_values(run.comm, std::span<const char>(mine));
    if (!text.empty()) hints.emplace(group.parameter, std::string(text.begin(), text.end()));
  }
  return hints;
}

}  // namespace gradclip
