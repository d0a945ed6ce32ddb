#pragma once
// Seam 1: arithmetic on bytes. A backend knows no mesh, no file and no MPI.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "gradclip/backend/chunk_table.hpp"
#include "gradclip/base/memory.hpp"

namespace gradclip {

/// Move-only owner of bytes that a backend allocated. Must not outlive its backend.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Bytes bytes, std::function<void(Bytes)> release) : bytes_(bytes), release_(std::move(release)) {}
  Buffer(Buffer&& other) noexcept : bytes_(std::exchange(other.bytes_, {})), release_(std::move(other.release_)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      reset();
      bytes_ = std::exchange(other.bytes_, {});
      release_ = std::move(other.release_);
    }
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { reset(); }

  [[nodiscard]] Bytes bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::byte* data() const noexcept { return bytes_.data; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_.size; }
  void reset() noexcept {
    if (bytes_.data != nullptr) release_(bytes_);
    bytes_ = {};
  }

 private:
  Bytes bytes_;
  std::function<void(Bytes)> release_;
};

struct BackendDescription {
  std::string device;         ///< "cpu" or "cuda", as --device takes it
  std::string detail;         ///< for people: instruction set, card
  MemorySpace working_space;  ///< where the chunks of a chunk table must lie
  /// Which device it is, unique in the world: processes that name the same one share it. Empty: none but the host.
  std::string identity;
  std::uint64_t device_memory = 0;       ///< bytes of the device that were free at the start; 0 without device memory
  std::uint64_t device_memory_peak = 0;  ///< most bytes that this backend has held on the device so far
};

/// Memory that is neither free nor in any Buffer: what a backend keeps to allocate faster.
enum class UnusedMemory : std::uint8_t { keep, release };

enum class AccumulateStep : std::uint8_t { assign, add };

/// What a device offers to the pipeline: eight coarse functions, called per batch of chunks.
///
/// Every result is a function of the chunk table alone: chunk and lane constants come from reduction.hpp, never from
/// the device, so that two backends give the same bits. The functions may be called from several threads at once. Calls
/// from one thread take effect in order and may be asynchronous until that thread calls wait() or moves something from
/// or to (pageable) host memory, which waits too; the spans of a table may be reused when the call returns, the bytes
/// that a call names only after that wait, and only then may another thread see its effect. A Buffer may be released
/// earlier by the thread that used it. Failures of the device and of memory are Error with ExitCode::resources; one of
/// an asynchronous call appears in it or in a later one.
class Backend {
 public:
  virtual ~Backend() = default;

  [[nodiscard]] virtual BackendDescription describe() const = 0;

  /// Uninitialised bytes, aligned to at least 64. `bytes` may be 0.
  [[nodiscard]] virtual Buffer allocate(std::size_t bytes, MemorySpace space) = 0;

  /// Copies from.size bytes between any two spaces. @pre from.size == to.size, no overlap.
  virtual void move(Bytes from, Bytes to) = 0;

  /// Returns when everything that the calling thread asked for is done. `release` also gives unused memory back to the
  /// device, as torch.cuda.empty_cache() does.
  virtual void wait(UnusedMemory unused) = 0;

  /// Statistics of the scaled values of every chunk; the stored bytes stay as they are.
  /// @param out  chunks.size() × sizeof(ChunkStatistics), in the working space: an array of ChunkStatistics.
  virtual void statistics(const ChunkTable& table, const StatisticsRequest& request, Bytes out) = 0;

  /// Replaces every stored element of the chunks by its scaled and clipped value.
  virtual void scale(const ChunkTable& table) = 0;

  /// Reduces the addends of a Partial dimension element by element, each scaled first, in table order, in float64.
  /// @param addends  tables of equal chunk counts; chunk i has the same element count and type in each.
  /// @param divisor  what avg divides by, once: the size of the dimension (addends that are None are not in `addends`).
  /// @param out      float64, the chunks one after another: 8 × the sum of their counts, in the working space.
  virtual void combine(std::span<const ChunkTable> addends, PartialOperation operation, double divisor, Bytes out) = 0;

  /// Elements converted to into's type (for float8 with the scale_inv of their factors, of which nothing else applies)
  /// replace those of `into`, or are added to them; each of the two roundings is to into's type.
  /// @param into  chunk i has the element count of from.chunks[i]; its factors are not read. No overlap.
  virtual void accumulate(std::span<const Chunk> into, const ChunkTable& from, AccumulateStep step) = 0;
};

/// What --device asks for.
enum class DeviceChoice { automatic, cpu, cuda };

struct ChosenBackend {
  std::unique_ptr<Backend> backend;
  std::string reason;  ///< one sentence: why this one
};

/// The backend for a choice. automatic takes the best that works here; a device that is asked for by name and is not
/// available is Error with ExitCode::resources and the reason ("this build has no CUDA").
/// @param process_on_host  which of the host's processes this one is: process i takes device i modulo their number.
[[nodiscard]] ChosenBackend make_backend(DeviceChoice choice, std::size_t process_on_host = 0);

}  // namespace gradclip
