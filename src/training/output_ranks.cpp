#include "gradclip/training/output_ranks.hpp"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>
#include <string>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/training/step_labels.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kGradientBytes = 1024;  // a described gradient of a rank file takes no more, beside its addends

}  // namespace

std::size_t OutputRanks::take(std::span<const std::int32_t> ranks, std::size_t memory) {
  ranks_.clear();
  sums_.clear();
  shard_of_.clear();
  shards_.clear();
  outputs_.clear();
  const bool reduces = std::any_of(plans_.begin(), plans_.end(), [](const auto& plan) { return plan.reduces(); });
  const std::size_t most = reduces ? ranks.size() : 1;
  for (std::size_t described = 0; ranks_.size() < most && described <= memory;) {
    ranks_.push_back(ranks[ranks_.size()]);
    described += describe(ranks_.back());
  }
  return ranks_.size();
}

/// Notes the sums that the rank keeps parts of. @return bytes that it takes to describe them
std::size_t OutputRanks::describe(std::int32_t rank) {
  std::size_t bytes = 0;
  for (std::size_t p = 0; p < plans_.size(); ++p) {
    if (!manifest_.holds(plans_[p].output, rank)) continue;
    bytes += kGradientBytes;
    Sum& sum = sums_[{p, plans_[p].first_addend(manifest_, rank)}];
    if (sum.addends) continue;
    sum.addends = std::make_shared<const std::vector<std::int32_t>>(plans_[p].addends(manifest_, rank));
    bytes += sum.addends->size() * sizeof(std::int32_t);
  }
  return bytes;
}

void OutputRanks::create(DumpWriter& writer) {
  find_gradients();
  for (const std::int32_t rank : ranks_) create(rank, writer);
}

/// File by file: sum by sum each file would be opened for each of them.
void OutputRanks::find_gradients() {
  std::set<std::int32_t> inputs(ranks_.begin(), ranks_.end());
  for (const auto& [place, sum] : sums_) inputs.insert(sum.addends->begin(), sum.addends->end());
  inputs_.assign(inputs.begin(), inputs.end());
  for (const std::int32_t rank : inputs_) {
    for (std::size_t p = 0; p < plans_.size(); ++p) {
      Sum* sum = sum_of(p, rank);
      if (sum != nullptr && sum->none) sum->none = none(p, rank);
    }
  }
}

/// The sum that the rank adds to. Null: none that is needed here.
OutputRanks::Sum* OutputRanks::sum_of(std::size_t parameter, std::int32_t rank) {
  if (!manifest_.holds(plans_[parameter].output, rank)) return nullptr;
  const auto found = sums_.find({parameter, plans_[parameter].first_addend(manifest_, rank)});
  return found == sums_.end() ? nullptr : &found->second;
}

bool OutputRanks::none(std::size_t parameter, std::int32_t rank) const {
  return std::all_of(dumps_.begin(), dumps_.end(),
                     [&](const auto& dump) { return dump->rank_file(rank)->locate(parameter).none; });
}

void OutputRanks::create(std::int32_t rank, DumpWriter& writer) {
  std::vector<NewGradient> gradients;
  std::vector<std::string> none;
  for (std::size_t p = 0; p < plans_.size(); ++p) {
    const ReductionPlan& plan = plans_[p];
    const ParameterEntry& entry = plan.output;
    const Sum* sum = sum_of(p, rank);
    if (sum == nullptr) continue;
    if (sum->none) {
      none.push_back(entry.recorded_name());
      continue;
    }
    const auto [place, first_copy] = shard_of_.emplace(OfRank{p, plan.first_copy(manifest_, rank)}, shards_.size());
    if (first_copy) {
      ReducedShard& shard = shards_.emplace_back();
      shard.parameter = p;
      shard.kept = manifest_.layout(entry, rank);
      shard.addends = sum->addends;
    }
    ReducedShard& shard = shards_[place->second];
    shard.copies.push_back({outputs_.size(), gradients.size()});
    gradients.push_back({entry.dataset, shard.kept.local_shape(), entry.dtype, std::nullopt});
    bytes_ += shard.kept.elements() * size_of(entry.dtype);
  }
  const std::filesystem::path path = writer.writing_directory() / manifest_.rank_file_name(rank);
  const StepLabels labels(dumps_, rank);
  if (labels.incomplete()) without_labels_.push_back(rank);
  labelled_ = labelled_ || !labels.shapes().empty();
  NewRankFile made(path, {rank, manifest_.world_size, manifest_.step}, gradients, none, labels.shapes());
  labels.write(PosixFile::open_for_writing(path, false), made.label_offsets());
  // What has no elements is never appended to.
  outputs_.push_back({rank, std::move(made), std::vector<std::uint64_t>(gradients.size(), Checksum().digest())});
}

void OutputRanks::append(ReducedShard& shard, std::span<const std::byte> stored) {
  const std::size_t size = size_of(plans_[shard.parameter].output.dtype);
  if (!shard.checksum) shard.checksum.emplace();
  shard.checksum->update(stored.data(), stored.size());
  for (const ReducedShard::Copy& copy : shard.copies) {
    const NewRankFile& made = outputs_[copy.output].made;
    // Opened for each: they are more than may be open.
    PosixFile::open_for_writing(made.path(), false)
        .write(made.offsets()[copy.gradient] + shard.done * size, stored.data(), stored.size());
  }
  shard.done += stored.size() / size;
  if (shard.done < shard.kept.elements()) return;
  for (const ReducedShard::Copy& copy : shard.copies) {
    outputs_[copy.output].checksums[copy.gradient] = shard.checksum->digest();
  }
  shard.checksum.reset();
}

std::vector<WrittenRank> OutputRanks::finish(const DumpWriter& writer) {
  std::vector<WrittenRank> written;
  for (Output& output : outputs_)
    written.emplace_back(output.rank, output.made.finish(output.checksums, writer.reads_back()));
  return written;
}

}  // namespace gradclip
