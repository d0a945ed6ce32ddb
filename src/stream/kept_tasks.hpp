#pragma once
// Which tasks of a pass find their shards in memory, and which are to leave them there. Inside of the room.

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/stream/block_cutter.hpp"
#include "gradclip/stream/gradient_storage.hpp"
#include "gradclip/stream/shard_stream.hpp"

namespace gradclip {

class KeptTasks {
 public:
  /// Where a task's elements are when the pass begins, and where the backend works on them.
  enum class Place : std::uint8_t {
    file,          ///< read into a slot, worked on there
    becomes_kept,  ///< read into a slot, moved to the kept shard and worked on there
    kept,          ///< worked on in the kept shard
    kept_on_host,  ///< moved from the kept shard into a slot, worked on there
  };

  KeptTasks(GradientStorage& storage, std::span<const ShardTask> tasks) : storage_(storage), tasks_(tasks) {}

  /// For a pass that measures: what is not kept yet will be, as far as there is room. Before the workers begin.
  void keep_what_is_read(Backend& backend);
  /// For a pass that scales: what is kept is spoiled, and counts as incomplete from now on. Before the workers begin.
  void take();

  [[nodiscard]] Place place(const Piece& piece) const noexcept {
    return entries_.empty() ? Place::file : entries_[piece.task].place;
  }
  /// Whether the backend works on the piece in its kept shard.
  [[nodiscard]] bool works_on_kept(const Piece& piece) const noexcept {
    return place(piece) == Place::kept || place(piece) == Place::becomes_kept;
  }
  /// The piece's bytes in its kept shard. @pre place() is not file
  [[nodiscard]] Bytes bytes(const Piece& piece) const noexcept;

  /// The pass is through with a piece: with a task's last one its shard is complete, or, once written, freed.
  void finish(const Piece& piece);

 private:
  struct Entry {
    KeptShard* shard = nullptr;
    Place place = Place::file;
    std::atomic<std::uint64_t> done{0};
  };

  void look_up();

  GradientStorage& storage_;
  std::span<const ShardTask> tasks_;
  std::vector<Entry> entries_;  ///< by task; empty where nothing is kept
  bool frees_ = false;
};

}  // namespace gradclip
