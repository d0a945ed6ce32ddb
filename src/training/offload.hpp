#pragma once
// Model parts between device and host memory, as NeMo Automodel's training.utils moves modules
// (move_to_device, ScopedModuleOffloading): there parameters, buffers and their gradients, here the gradients that are
// kept between passes. What a pass computes does not depend on where they lie.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "gradclip/dump/manifest.hpp"
#include "gradclip/stream/gradient_storage.hpp"
#include "gradclip/stream/shard_stream.hpp"
#include "gradclip/stream/task_list.hpp"

namespace gradclip {

/// Moves every kept shard of the part, waits, and gives the backend's unused memory back. A shard that finds no room on
/// the device stays in host memory, from where passes stream it; one that finds none in host memory is dropped, and
/// later passes read it again. Nothing moves where the backend works in host memory.
/// @param space  device, or pinned for the host
/// Errors: Error(resources) of the device; the part is then empty.
void move_to_device(ModelPart& part, Backend& backend, MemorySpace space);

/// A part that is on the device within a scope and in host memory outside of it.
class ScopedModuleOffloading {
 public:
  /// Moves the part in. @param enabled  false: does nothing, here and at the end  Errors: as move_to_device().
  ScopedModuleOffloading(ModelPart& part, Backend& backend, bool enabled);
  /// Moves it out, also when an exception passes. Nothrow: a part that cannot be moved is dropped.
  ~ScopedModuleOffloading();
  ScopedModuleOffloading(const ScopedModuleOffloading&) = delete;
  ScopedModuleOffloading& operator=(const ScopedModuleOffloading&) = delete;

 private:
  ModelPart& part_;
  Backend& backend_;
  bool enabled_;
};

/// Whether passes of this stream offload: it was asked for and the backend has memory of its own.
[[nodiscard]] bool offloads(const ShardStream& stream) noexcept;

/// The model parts that a pass over the parameters takes one after another, ascending; without offloading one empty
/// entry: all at once.
[[nodiscard]] std::vector<std::optional<std::int64_t>> parts_in_turn(const ShardStream& stream,
                                                                     const Manifest& manifest,
                                                                     ParameterRange parameters);

/// Tasks that are worked on together.
struct TaskGroup {
  std::optional<std::int64_t> model_part;  ///< empty: of any part
  std::vector<std::size_t> tasks;          ///< indices, ascending
};

/// The tasks of a pass that writes, by model part in ascending order; without offloading all in one. Shards that are
/// written through HDF5 have to be written in the order of the tasks: they go through the slots in a group of their own
/// without a part.
[[nodiscard]] std::vector<TaskGroup> writing_groups(const ShardStream& stream, std::span<const ShardTask> tasks);

}  // namespace gradclip
