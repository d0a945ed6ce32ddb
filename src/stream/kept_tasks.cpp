#include "gradclip/stream/kept_tasks.hpp"

namespace gradclip {

void KeptTasks::look_up() {
  entries_ = std::vector<Entry>(tasks_.size());
  for (std::size_t i = 0; i < tasks_.size(); ++i) {
    const ShardTask& task = tasks_[i];
    Entry& entry = entries_[i];
    entry.shard = storage_.find(task.model_part, {task.rank, task.parameter});
    if (entry.shard == nullptr) continue;
    entry.place = entry.shard->space() == MemorySpace::device ? Place::kept : Place::kept_on_host;
  }
}

void KeptTasks::keep_what_is_read(Backend& backend) {
  look_up();
  for (std::size_t i = 0; i < tasks_.size(); ++i) {
    const ShardTask& task = tasks_[i];
    Entry& entry = entries_[i];
    if (entry.shard != nullptr || task.shard->elements == 0) continue;
    const std::size_t bytes = task.shard->elements * size_of(task.shard->dtype);
    entry.shard = storage_.begin(backend, task.model_part, {task.rank, task.parameter}, bytes);
    if (entry.shard != nullptr) entry.place = Place::becomes_kept;
  }
}

void KeptTasks::take() {
  look_up();
  frees_ = true;
  for (Entry& entry : entries_) {
    if (entry.shard != nullptr) entry.shard->complete = false;
  }
}

Bytes KeptTasks::bytes(const Piece& piece) const noexcept {
  const std::size_t size = size_of(tasks_[piece.task].shard->dtype);
  return entries_[piece.task].shard->buffer.bytes().subspan(piece.first * size, piece.count * size);
}

void KeptTasks::finish(const Piece& piece) {
  if (place(piece) == Place::file) return;
  Entry& entry = entries_[piece.task];
  const ShardTask& task = tasks_[piece.task];
  if (entry.done.fetch_add(piece.count) + piece.count != task.shard->elements) return;
  if (frees_) {
    storage_.release(task.model_part, {task.rank, task.parameter});
  } else {
    entry.shard->complete = true;
  }
}

}  // namespace gradclip
