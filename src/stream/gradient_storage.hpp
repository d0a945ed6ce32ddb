#pragma once
// Gradients that stay in memory between passes, so that later passes neither read nor upload them again.

#include <compare>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "gradclip/backend/backend.hpp"
#include "gradclip/stream/memory_budget.hpp"

namespace gradclip {

/// For unwinding: returns when everything that the calling thread asked for is done, or the device has failed and works
/// on nothing. Before anybody frees or fills bytes that calls named.
void wait_quietly(Backend& backend) noexcept;

/// What kept shards may take, wherever they lie.
struct MemoryBudgets {
  MemoryBudget device;
  MemoryBudget host;

  [[nodiscard]] MemoryBudget& of(MemorySpace space) noexcept { return space == MemorySpace::device ? device : host; }
};

/// A recorded rank's shard of a parameter.
struct ShardKey {
  std::int32_t rank = 0;
  std::size_t parameter = 0;

  friend auto operator<=>(const ShardKey&, const ShardKey&) = default;
};

/// The elements of one whole shard as the dump has them, in device or pinned memory.
struct KeptShard {
  MemoryBudget::Share share;
  Buffer buffer;  ///< freed before its bytes count as free
  bool complete = false;

  [[nodiscard]] MemorySpace space() const noexcept { return buffer.bytes().space; }
};

/// An empty KeptShard of so many bytes; nothing where the budget or the memory itself has no room, which is no error:
/// other programs use the device too.
[[nodiscard]] std::optional<KeptShard> make_room(MemoryBudgets& budgets, Backend& backend, std::size_t bytes,
                                                 MemorySpace space);

/// The kept shards of one part of the model (ParameterEntry::model_part), of this process's recorded ranks.
struct ModelPart {
  std::int64_t id = 0;
  std::map<ShardKey, KeptShard> shards;  ///< pointers to entries stay valid
  MemoryBudgets* budgets = nullptr;

  /// Of the shards that lie in a space.
  [[nodiscard]] std::size_t bytes(MemorySpace space) const noexcept;
};

/// The kept shards of this process by model part. Filled and consulted by the thread that starts passes; release() is
/// for their workers. Must not outlive the backend.
class GradientStorage {
 public:
  GradientStorage(std::size_t device_bytes, std::size_t host_bytes)
      : budgets_{MemoryBudget(device_bytes), MemoryBudget(host_bytes)} {}

  /// The part with this number, made if there is none. Stays where it is.
  [[nodiscard]] ModelPart& part(std::int64_t id);

  /// The shard if it is kept whole, else null.
  [[nodiscard]] KeptShard* find(std::int64_t part, const ShardKey& key);

  /// Room on the device for a shard that is about to be read; null where there is none, or keep_no_more() was called.
  /// Whoever fills it sets `complete`.
  [[nodiscard]] KeptShard* begin(Backend& backend, std::int64_t part, const ShardKey& key, std::size_t bytes);

  /// For the last pass over the gradients: it takes what is kept and leaves nothing.
  void keep_no_more() noexcept { keeps_ = false; }

  /// Frees a shard. Thread-safe against other calls of release().
  void release(std::int64_t part, const ShardKey& key) noexcept;

  /// After a failed pass: frees what it did not finish. At rest.
  void drop_incomplete() noexcept;

  [[nodiscard]] std::size_t bytes(MemorySpace space) const noexcept;
  [[nodiscard]] const MemoryBudgets& budgets() const noexcept { return budgets_; }

 private:
  MemoryBudgets budgets_;
  std::map<std::int64_t, ModelPart> parts_;
  std::mutex mutex_;
  bool keeps_ = true;
};

}  // namespace gradclip
