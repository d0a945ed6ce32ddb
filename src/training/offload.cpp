#include "gradclip/training/offload.hpp"

#include <map>
#include <set>
#include <utility>

namespace gradclip {

void move_to_device(ModelPart& part, Backend& backend, MemorySpace space) {
  if (backend.describe().working_space == MemorySpace::host) return;
  std::vector<KeptShard> left;  // copies are under way from there
  try {
    for (auto place = part.shards.begin(); place != part.shards.end();) {
      KeptShard& shard = place->second;
      const bool moves = shard.complete && shard.space() != space;
      std::optional<KeptShard> there;
      if (moves) there = make_room(*part.budgets, backend, shard.buffer.size(), space);
      if (there) {
        backend.move(shard.buffer.bytes(), there->buffer.bytes());
        there->complete = true;
        left.push_back(std::exchange(shard, std::move(*there)));
      } else if (!shard.complete || (moves && space != MemorySpace::device)) {
        place = part.shards.erase(place);
        continue;
      }
      ++place;
    }
    backend.wait(UnusedMemory::keep);
    left.clear();
    backend.wait(UnusedMemory::release);
  } catch (...) {
    wait_quietly(backend);
    part.shards.clear();  // what was under way may not have arrived
    throw;
  }
}

ScopedModuleOffloading::ScopedModuleOffloading(ModelPart& part, Backend& backend, bool enabled)
    : part_(part), backend_(backend), enabled_(enabled) {
  if (enabled_) move_to_device(part_, backend_, MemorySpace::device);
}

ScopedModuleOffloading::~ScopedModuleOffloading() {
  if (!enabled_) return;
  try {
    move_to_device(part_, backend_, MemorySpace::pinned);
  } catch (...) {
    // The part was dropped, and later passes read it again.
  }
}

bool offloads(const ShardStream& stream) noexcept {
  return stream.options().offload && !stream.on_host();
}

std::vector<std::optional<std::int64_t>> parts_in_turn(const ShardStream& stream, const Manifest& manifest,
                                                       ParameterRange parameters) {
  if (!offloads(stream)) return {std::nullopt};
  std::set<std::int64_t> parts;
  for (std::size_t p = parameters.begin; p < parameters.end; ++p) parts.insert(manifest.parameters[p].model_part);
  if (parts.empty()) return {std::nullopt};  // rank files are opened, and so checked, all the same
  return {parts.begin(), parts.end()};
}

std::vector<TaskGroup> writing_groups(const ShardStream& stream, std::span<const ShardTask> tasks) {
  const bool by_part = offloads(stream);
  TaskGroup together;
  std::map<std::int64_t, TaskGroup> parts;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const bool in_order = !tasks[i].shard->file_offset;
    TaskGroup& group = by_part && !in_order ? parts[tasks[i].model_part] : together;
    group.tasks.push_back(i);
  }
  std::vector<TaskGroup> groups;
  if (!together.tasks.empty()) groups.push_back(std::move(together));
  for (auto& [part, group] : parts) {
    group.model_part = part;
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace gradclip
