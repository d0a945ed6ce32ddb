#include "gradclip/dump/chunk_reader.hpp"

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/boxes.hpp"
#include "gradclip/dump/chunk_filters.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMaxChunkBytes = std::size_t{256} << 20;
constexpr std::size_t kCacheBytes = std::size_t{64} << 20;

using Content = std::shared_ptr<const std::vector<std::byte>>;

/// Position of the chunk in the file, which is unique within one file.
struct ChunkKey {
  std::uint64_t file_id;
  std::uint64_t dataset;
  std::uint64_t position;

  friend auto operator<=>(const ChunkKey&, const ChunkKey&) = default;
};

class ChunkCache {
 public:
  Content find(const ChunkKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(key);
    if (found == entries_.end()) return nullptr;
    recent_.splice(recent_.begin(), recent_, found->second);
    return found->second->second;
  }

  void insert(const ChunkKey& key, const Content& content) {
    if (content->size() > kCacheBytes / 4) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.count(key) != 0) return;
    recent_.emplace_front(key, content);
    entries_.emplace(key, recent_.begin());
    bytes_ += content->size();
    while (bytes_ > kCacheBytes) {
      bytes_ -= recent_.back().second->size();
      entries_.erase(recent_.back().first);
      recent_.pop_back();
    }
  }

 private:
  using List = std::list<std::pair<ChunkKey, Content>>;
  std::mutex mutex_;
  List recent_;
  std::map<ChunkKey, List::iterator> entries_;
  std::size_t bytes_ = 0;
};

ChunkCache& cache() {
  static ChunkCache instance;
  return instance;
}

std::size_t checked_chunk_bytes(const hdf5::Dataset& dataset, const std::string& where) {
  std::uint64_t bytes = dataset.type.size;
  for (const std::uint64_t extent : dataset.chunk) {
    if (__builtin_mul_overflow(bytes, extent, &bytes) || bytes > kMaxChunkBytes) {
      throw Error(ExitCode::bad_input, {.where = where,
                                        .found = "has chunks of more than 256 MiB",
                                        .expected = "smaller chunks, or no chunks",
                                        .advice = "repack the file (h5repack -l CHUNK=...)"});
    }
  }
  return bytes;
}

}  // namespace

void read_chunked(const hdf5::Dataset& dataset, std::uint64_t file_size, std::uint64_t file_id, std::uint64_t first,
                  std::uint64_t count, std::byte* to, const std::string& where) {
  const std::size_t chunk_bytes = checked_chunk_bytes(dataset, where);
  const auto content = [&](std::span<const std::uint64_t> start) -> Content {
    std::uint64_t position = 0;
    for (std::size_t d = 0; d < start.size(); ++d) {
      position = position * static_cast<std::uint64_t>(dataset.shape[d]) + start[d];
    }
    const ChunkKey key{file_id, dataset.address, position};
    if (Content known = cache().find(key)) return known;
    hdf5::StoredChunk chunk = hdf5::read_stored_chunk(dataset, start, file_size, where);
    auto decoded = std::make_shared<const std::vector<std::byte>>(decode_chunk(
        std::move(chunk.bytes), dataset.filters, chunk.skipped_filters, dataset.type.size, chunk_bytes, where));
    cache().insert(key, decoded);
    return decoded;
  };
  for (const Box& box : boxes_of_range(dataset.shape, first, count)) {
    for_each_chunk(box, dataset.chunk, [&](std::span<const std::uint64_t> start) {
      copy_from_chunk(start, dataset.chunk, content(start)->data(), box, to, dataset.type.size);
    });
    to += box.elements() * dataset.type.size;
  }
}

}  // namespace gradclip
