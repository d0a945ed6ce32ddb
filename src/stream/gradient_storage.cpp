#include "gradclip/stream/gradient_storage.hpp"

#include <utility>

#include "gradclip/base/error.hpp"

namespace gradclip {

void wait_quietly(Backend& backend) noexcept {
  try {
    backend.wait(UnusedMemory::keep);
  } catch (...) {
    // Whoever calls the device next meets its failure again.
  }
}

std::optional<KeptShard> make_room(MemoryBudgets& budgets, Backend& backend, std::size_t bytes, MemorySpace space) {
  MemoryBudget& budget = budgets.of(space);
  try {
    std::optional<MemoryBudget::Share> share = budget.take(bytes);
    if (!share) return std::nullopt;
    return KeptShard{std::move(*share), backend.allocate(bytes, space)};
  } catch (const Error& error) {
    if (error.code() != ExitCode::resources) throw;
    budget.limit_to_used();  // not to be asked for again with every shard
    return std::nullopt;
  }
}

std::size_t ModelPart::bytes(MemorySpace space) const noexcept {
  std::size_t bytes = 0;
  for (const auto& [key, shard] : shards) bytes += shard.space() == space ? shard.buffer.size() : 0;
  return bytes;
}

ModelPart& GradientStorage::part(std::int64_t id) {
  ModelPart& part = parts_[id];
  part.id = id;
  part.budgets = &budgets_;
  return part;
}

KeptShard* GradientStorage::find(std::int64_t part, const ShardKey& key) {
  const auto owner = parts_.find(part);
  if (owner == parts_.end()) return nullptr;
  const auto place = owner->second.shards.find(key);
  const bool whole = place != owner->second.shards.end() && place->second.complete;
  return whole ? &place->second : nullptr;
}

KeptShard* GradientStorage::begin(Backend& backend, std::int64_t part, const ShardKey& key, std::size_t bytes) {
  ModelPart& owner = this->part(part);
  if (!keeps_ || owner.shards.count(key) != 0) return nullptr;
  std::optional<KeptShard> room = make_room(budgets_, backend, bytes, MemorySpace::device);
  if (!room) return nullptr;
  return &owner.shards.emplace(key, std::move(*room)).first->second;
}

void GradientStorage::release(std::int64_t part, const ShardKey& key) noexcept {
  decltype(ModelPart::shards)::node_type shard;  // freed outside of the lock
  const std::lock_guard lock(mutex_);
  const auto owner = parts_.find(part);
  if (owner != parts_.end()) shard = owner->second.shards.extract(key);
}

void GradientStorage::drop_incomplete() noexcept {
  for (auto& [id, part] : parts_) std::erase_if(part.shards, [](const auto& entry) { return !entry.second.complete; });
}

std::size_t GradientStorage::bytes(MemorySpace space) const noexcept {
  std::size_t bytes = 0;
  for (const auto& [id, part] : parts_) bytes += part.bytes(space);
  return bytes;
}

}  // namespace gradclip
