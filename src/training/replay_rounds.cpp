#include "gradclip/training/replay_rounds.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <tuple>

#include "gradclip/base/worker_pool.hpp"
#include "gradclip/training/slices.hpp"

namespace gradclip {
namespace {

constexpr std::uint64_t kLeastPortion = 256;  // elements, as of a block

/// The scale of a float8 gradient that is recorded without one. Where weights are cached it may be recorded with the
/// first microbatch alone, and later ones reuse it.
float earlier_scale_inv(const MicrobatchDumps& dumps, std::size_t microbatch, std::int32_t rank,
                        std::size_t parameter) {
  for (std::size_t k = microbatch; k-- > 0;) {
    const std::shared_ptr<const RankFile> file = dumps[k]->rank_file(rank);
    const StoredShard& shard = file->locate(parameter);
    if (!shard.none && shard.scale_inv) return *shard.scale_inv;
  }
  return 1.0F;
}

/// How many rank files of every dump may be open.
std::size_t capacity_of(const MicrobatchDumps& dumps) {
  std::size_t capacity = dumps[0]->capacity();
  for (const auto& dump : dumps) capacity = std::min(capacity, dump->capacity());
  return capacity;
}

}  // namespace

ReplayRounds::ReplayRounds(const ReplayRun& run, OutputRanks& output)
    : run_(run), output_(output), keeps_(output.inputs().size() > capacity_of(run.dumps)) {}

void ReplayRounds::replay() {
  for (std::size_t first = 0; first < output_.shards().size();) {
    begin_round(first);
    if (keeps_) read_round();
    parallel_for(round_.size(), run_.workers.size(),
                 [this](std::size_t i, std::size_t worker) { replay(round_[i], run_.workers[worker]); });
  }
}

/// Takes the next portions: of a shard no more than a thread's part, so that all have work.
/// @param first  the first shard that is not done; then the first that is not once the round is
void ReplayRounds::begin_round(std::size_t& first) {
  std::vector<ReducedShard>& shards = output_.shards();
  const std::uint64_t most_bytes = std::max<std::uint64_t>(1, run_.round_bytes / run_.workers.size());
  round_.clear();
  std::uint64_t bytes = 0, kept = 0, described = 0;
  bool all_done = true;
  for (std::size_t i = first; i < shards.size() && bytes + described < run_.round_bytes; ++i) {
    ReducedShard& shard = shards[i];
    Portion portion{&shard, shard.kept.elements() - shard.done, 0, bytes, kept};
    if (keeps_ && portion.elements > 0) {
      const std::uint64_t size = bytes_per_element(shard);
      const std::uint64_t gradients = shard.addends->size() * run_.dumps.size();
      const std::uint64_t most = std::max(kLeastPortion, most_bytes / (size * gradients));
      portion.elements = std::min(portion.elements, most);
      portion.stride = portion.elements * size;
      bytes += portion.stride * gradients;
      kept += gradients;
      described += gradients * (sizeof(kept_[0]) + sizeof(Visit));
    }
    all_done = all_done && shard.done + portion.elements == shard.kept.elements();
    if (all_done) first = i + 1;
    if (portion.elements > 0) round_.push_back(portion);
  }
  bytes_.resize(bytes);
  kept_.resize(kept);
}

/// In memory, of one gradient: of the widest of the microbatches' types.
std::uint64_t ReplayRounds::bytes_per_element(const ReducedShard& shard) const {
  std::size_t size = 1;
  for (const auto& dump : run_.dumps) {
    size = std::max(size, size_of(dump->manifest().parameters[shard.parameter].dtype));
  }
  return size;
}

void ReplayRounds::read_round() {
  visits_.clear();
  for (std::size_t i = 0; i < round_.size(); ++i) {
    const std::vector<std::int32_t>& addends = *round_[i].shard->addends;
    for (std::uint32_t addend = 0; addend < addends.size(); ++addend) visits_.push_back({addends[addend], addend, i});
  }
  std::sort(visits_.begin(), visits_.end(), [](const Visit& a, const Visit& b) {
    return std::tie(a.rank, a.portion, a.addend) < std::tie(b.rank, b.portion, b.addend);
  });
  std::vector<std::size_t> begins;  // of each rank's visits, and the end
  for (std::size_t i = 0; i < visits_.size(); ++i) {
    if (i == 0 || visits_[i].rank != visits_[i - 1].rank) begins.push_back(i);
  }
  begins.push_back(visits_.size());
  parallel_for(begins.size() - 1, run_.workers.size(),
               [&](std::size_t i, std::size_t) { read_rank(begins[i], begins[i + 1]); });
}

/// What visits [first, last), all of one rank, bring. Its files are held: other threads open theirs meanwhile, and
/// would have them closed between two visits.
void ReplayRounds::read_rank(std::size_t first, std::size_t last) {
  for (std::size_t k = 0; k < run_.dumps.size(); ++k) {
    const std::shared_ptr<const RankFile> file = run_.dumps[k]->rank_file(visits_[first].rank);
    for (std::size_t i = first; i < last; ++i) {
      const Portion& portion = round_[visits_[i].portion];
      const std::size_t place = visits_[i].addend * run_.dumps.size() + k;
      kept_[portion.kept_at + place] = read(*file, k, *portion.shard, portion.shard->done, portion.elements,
                                            bytes_.data() + portion.bytes_at + place * portion.stride);
    }
  }
}

void ReplayRounds::replay(const Portion& portion, WindowReplay& worker) {
  ReducedShard& shard = *portion.shard;
  const ReductionPlan& plan = run_.plans[shard.parameter];
  const std::uint64_t begin = shard.done;
  const std::uint64_t block = worker.block_elements(plan, shard.addends->size());
  for (std::uint64_t first = 0; first < portion.elements; first += block) {
    const std::uint64_t count = std::min(block, portion.elements - first);
    const auto take = [&](std::size_t addend, std::size_t microbatch, std::byte* to) {
      return keeps_ ? copy(portion, addend, microbatch, first, count, to)
                    : read(*run_.dumps[microbatch]->rank_file((*shard.addends)[addend]), microbatch, shard,
                           begin + first, count, to);
    };
    output_.append(shard,
                   worker.replay(plan, run_.ends, shard.addends->size(), static_cast<std::uint32_t>(count), take));
  }
}

/// Elements [first, first + count) of the portion, from memory.
std::optional<MicrobatchGradient> ReplayRounds::copy(const Portion& portion, std::size_t addend, std::size_t microbatch,
                                                     std::uint64_t first, std::uint64_t count, std::byte* to) const {
  const std::size_t place = addend * run_.dumps.size() + microbatch;
  const std::optional<MicrobatchGradient>& gradient = kept_[portion.kept_at + place];
  if (!gradient) return gradient;
  const std::size_t size = size_of(gradient->dtype);
  std::memcpy(to, bytes_.data() + portion.bytes_at + place * portion.stride + first * size, count * size);
  return gradient;
}

/// Elements [first, first + count) of the shard, from an addend's file.
std::optional<MicrobatchGradient> ReplayRounds::read(const RankFile& file, std::size_t microbatch,
                                                     const ReducedShard& shard, std::uint64_t first,
                                                     std::uint64_t count, std::byte* to) const {
  const StoredShard& stored = file.locate(shard.parameter);
  if (stored.none) return std::nullopt;
  read_slice(file, stored, shard.kept, first, count, to);
  if (run_.progress) run_.progress(count * size_of(stored.dtype));
  if (size_of(stored.dtype) != 1) return MicrobatchGradient{stored.dtype, 1.0F};
  if (stored.scale_inv) return MicrobatchGradient{stored.dtype, *stored.scale_inv};
  return MicrobatchGradient{stored.dtype, earlier_scale_inv(run_.dumps, microbatch, file.rank(), shard.parameter)};
}

}  // namespace gradclip
