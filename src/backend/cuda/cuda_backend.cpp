#include "gradclip/backend/cuda/cuda_backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gradclip/backend/cuda/kernels.hpp"
#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/divisions.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/cuda_runtime/cuda_runtime.hpp"

namespace gradclip {
namespace {

/// The oldest devices that the kernels are compiled for (warp-wide integer reductions).
constexpr int kLeastMajor = 8;

constexpr std::size_t kTableAlignment = 16;

/// Tables that a thread may have under way before it waits for the oldest to be copied.
constexpr std::size_t kTablesUnderWay = 4;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kTableAlignment - 1) / kTableAlignment * kTableAlignment;
}

/// Arrays that a launch reads, one after another in one copy.
class TableBytes {
 public:
  /// @return where the array will lie, from the table's start
  template <typename T>
  std::size_t add(std::span<const T> values) {
    const std::size_t at = bytes_.size();
    bytes_.resize(aligned(at + values.size_bytes()));
    if (!values.empty()) std::memcpy(bytes_.data() + at, values.data(), values.size_bytes());
    return at;
  }
  [[nodiscard]] const std::vector<std::byte>& bytes() const noexcept { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// What one calling thread has on the device: its stream, and the pinned memory its tables leave from.
class Lane {
 public:
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_.get(); }
  void wait() const { stream_.wait(); }

  /// Copies a table to the device asynchronously; the source may be reused at once.
  void upload(const std::vector<std::byte>& table, std::byte* device) {
    Departure& departure = departures_[next_++ % kTablesUnderWay];
    departure.copied.wait();
    if (departure.memory.size() < table.size()) departure.memory = cuda::PinnedMemory(2 * table.size());
    std::memcpy(departure.memory.data(), table.data(), table.size());
    GRADCLIP_CUDA(
        cudaMemcpyAsync(device, departure.memory.data(), table.size(), cudaMemcpyHostToDevice, stream_.get()));
    departure.copied.record(stream_.get());
  }

 private:
  struct Departure {
    cuda::PinnedMemory memory;
    cuda::Event copied;
  };

  cuda::Stream stream_;
  std::array<Departure, kTablesUnderWay> departures_;
  std::size_t next_ = 0;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, const cudaDeviceProp& properties, std::string identity)
      : device_(device),
        name_(properties.name),
        major_(properties.major),
        minor_(properties.minor),
        identity_(std::move(identity)) {
    cuda::use_device(device_);
    std::size_t total = 0;
    GRADCLIP_CUDA(cudaMemGetInfo(&free_at_start_, &total));
    int pools = 0;
    GRADCLIP_CUDA(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device_));
    if (pools != 0) {
      // Freed memory stays in the pool until wait(release): a pass allocates and frees the same sizes again and again.
      GRADCLIP_CUDA(cudaDeviceGetDefaultMemPool(&pool_, device_));
      auto keep = std::numeric_limits<std::uint64_t>::max();
      GRADCLIP_CUDA(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep));
    }
  }

  [[nodiscard]] BackendDescription describe() const override {
    return {.device = "cuda",
            .detail = fmt::format("{}, compute capability {}.{}", name_, major_, minor_),
            .working_space = MemorySpace::device,
            .identity = identity_,
            .device_memory = free_at_start_,
            .device_memory_peak = peak_};
  }

  [[nodiscard]] Buffer allocate(std::size_t bytes, MemorySpace space) override {
    if (bytes == 0) return Buffer({nullptr, 0, space}, [](Bytes) {});
    switch (space) {
      case MemorySpace::device:
        return Buffer({device_allocate(bytes, lane()), bytes, space}, [this](Bytes owned) { device_release(owned); });
      case MemorySpace::pinned: {
        cuda::use_device(device_);
        void* data = nullptr;
        GRADCLIP_CUDA(cudaHostAlloc(&data, bytes, cudaHostAllocDefault));
        return Buffer({static_cast<std::byte*>(data), bytes, space},
                      [](Bytes owned) { cuda::check_quietly(cudaFreeHost(owned.data)); });
      }
      case MemorySpace::host:
        break;
    }
    auto* data = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{64}));
    return Buffer({data, bytes, space}, [](Bytes owned) { ::operator delete (owned.data, std::align_val_t{64}); });
  }

  void move(Bytes from, Bytes to) override {
    GRADCLIP_CHECK(from.size == to.size, fmt::format("{} bytes to move into {}", from.size, to.size));
    const Lane& mine = lane();
    const bool pageable = from.space == MemorySpace::host || to.space == MemorySpace::host;
    const bool on_device = from.space == MemorySpace::device || to.space == MemorySpace::device;
    if (pageable) mine.wait();  // pinned memory may still be under way to where this goes
    if (from.size == 0) return;
    if (!on_device) {
      if (!pageable) mine.wait();
      std::memcpy(to.data, from.data, from.size);
      return;
    }
    GRADCLIP_CUDA(cudaMemcpyAsync(to.data, from.data, from.size, kind(from.space, to.space), mine.stream()));
    if (pageable) mine.wait();
  }

  void wait(UnusedMemory unused) override {
    lane().wait();
    if (unused == UnusedMemory::release && pool_ != nullptr) GRADCLIP_CUDA(cudaMemPoolTrimTo(pool_, 0));
  }

  void statistics(const ChunkTable& table, const StatisticsRequest& request, Bytes out) override {
    GRADCLIP_CHECK(out.size == table.chunks.size() * sizeof(ChunkStatistics),
                   fmt::format("{} bytes for results", out.size));
    const Uploaded uploaded = upload(table);
    auto* results = reinterpret_cast<ChunkStatistics*>(out.data);
    for_each_type(uploaded, [&](DType dtype, const cuda::DeviceTable& chunks) {
      check(cuda::launch_statistics(dtype, chunks, request, results, uploaded.lane->stream()), "statistics");
    });
  }

  void scale(const ChunkTable& table) override {
    std::vector<Chunk> changing;
    for (const Chunk& chunk : table.chunks) {
      if (chunk.count > 0 && changes_bits(checked_factors(table, chunk))) changing.push_back(chunk);
    }
    const Uploaded uploaded = upload({changing, table.factors});
    for_each_type(uploaded, [&](DType dtype, const cuda::DeviceTable& chunks) {
      check(cuda::launch_scale(dtype, chunks, uploaded.lane->stream()), "scale");
    });
  }

  void combine(std::span<const ChunkTable> addends, PartialOperation operation, double divisor, Bytes out) override {
    GRADCLIP_CHECK(!addends.empty(), "nothing to combine");
    const std::size_t chunks = addends[0].chunks.size();
    std::vector<double*> out_of(chunks);
    std::size_t written = 0;
    for (std::size_t i = 0; i < chunks; ++i) {
      out_of[i] = reinterpret_cast<double*>(out.data + written);
      written += addends[0].chunks[i].count * sizeof(double);
    }
    GRADCLIP_CHECK(written == out.size, fmt::format("{} bytes for {} bytes of results", out.size, written));

    // Chunk-major, sorted by type: a launch takes chunks of one type with all their addends.
    std::vector<ScaleFactors> factors;
    std::vector<std::uint32_t> first_factors;
    for (const ChunkTable& table : addends) {
      GRADCLIP_CHECK(table.chunks.size() == chunks, "addends of unequal shape");
      first_factors.push_back(static_cast<std::uint32_t>(factors.size()));
      factors.insert(factors.end(), table.factors.begin(), table.factors.end());
    }
    std::array<std::vector<cuda::DeviceChunk>, kDTypeCount> by_type;
    std::array<std::vector<double*>, kDTypeCount> out_by_type;
    for (std::size_t i = 0; i < chunks; ++i) {
      const Chunk& first = addends[0].chunks[i];
      if (first.count == 0) continue;
      const auto type = static_cast<std::size_t>(first.dtype);
      out_by_type[type].push_back(out_of[i]);
      for (std::size_t rank = 0; rank < addends.size(); ++rank) {
        const Chunk& chunk = addends[rank].chunks[i];
        GRADCLIP_CHECK(chunk.count == first.count && chunk.dtype == first.dtype, "addends of unequal shape");
        static_cast<void>(checked_factors(addends[rank], chunk));
        by_type[type].push_back(
            {chunk.data, chunk.count, first_factors[rank] + chunk.factors, static_cast<std::uint32_t>(i), 0});
      }
    }
    for (std::size_t type = 0; type < by_type.size(); ++type) {
      if (by_type[type].empty()) continue;
      TableBytes bytes;
      const std::size_t chunks_at = bytes.add(std::span<const cuda::DeviceChunk>(by_type[type]));
      const std::size_t factors_at = bytes.add(std::span<const ScaleFactors>(factors));
      const std::size_t out_at = bytes.add(std::span<double* const>(out_by_type[type]));
      const DeviceTableBuffer table(*this, bytes);
      cuda::CombineTable launch;
      launch.addends = {table.at<cuda::DeviceChunk>(chunks_at), table.at<ScaleFactors>(factors_at),
                        static_cast<std::uint32_t>(out_by_type[type].size())};
      launch.out = table.at<double*>(out_at);
      launch.ranks = static_cast<std::uint32_t>(addends.size());
      launch.operation = operation;
      launch.divisor = divisor;
      check(cuda::launch_combine(static_cast<DType>(type), launch, table.lane->stream()), "combine");
    }
  }

  void accumulate(std::span<const Chunk> into, const ChunkTable& from, AccumulateStep step) override {
    GRADCLIP_CHECK(into.size() == from.chunks.size(),
                   fmt::format("{} chunks into {}", from.chunks.size(), into.size()));
    for (int into_type = 0; into_type < kDTypeCount; ++into_type) {
      std::vector<Chunk> chunks;
      std::vector<std::byte*> targets;
      for (std::size_t i = 0; i < into.size(); ++i) {
        GRADCLIP_CHECK(into[i].count == from.chunks[i].count, "chunks of unequal shape");
        if (into[i].dtype != static_cast<DType>(into_type)) continue;
        chunks.push_back(from.chunks[i]);
        targets.push_back(into[i].data);
      }
      if (chunks.empty()) continue;
      const Uploaded uploaded = upload({chunks, from.factors}, targets);
      for_each_type(uploaded, [&](DType from_type, const cuda::DeviceTable& part) {
        std::byte* const* into_of = uploaded.targets + (part.chunks - uploaded.chunks);
        check(cuda::launch_accumulate(static_cast<DType>(into_type), from_type, into_of, part,
                                      step == AccumulateStep::add, uploaded.lane->stream()),
              "accumulate");
      });
    }
  }

 private:
  /// A table in device memory for as long as the launches that read it are given to its stream.
  struct DeviceTableBuffer {
    DeviceTableBuffer(CudaBackend& owner, const TableBytes& table) : backend(&owner), lane(&owner.lane()) {
      bytes = {owner.device_allocate(std::max<std::size_t>(1, table.bytes().size()), *lane),
               std::max<std::size_t>(1, table.bytes().size()), MemorySpace::device};
      try {
        if (!table.bytes().empty()) lane->upload(table.bytes(), bytes.data);
      } catch (...) {
        backend->device_release(bytes);
        throw;
      }
    }
    DeviceTableBuffer(DeviceTableBuffer&& other) noexcept
        : backend(other.backend), lane(other.lane), bytes(std::exchange(other.bytes, {})) {}
    DeviceTableBuffer& operator=(DeviceTableBuffer&&) = delete;
    DeviceTableBuffer(const DeviceTableBuffer&) = delete;
    DeviceTableBuffer& operator=(const DeviceTableBuffer&) = delete;
    ~DeviceTableBuffer() {
      if (bytes.data != nullptr) backend->device_release(bytes);
    }

    template <typename T>
    [[nodiscard]] const T* at(std::size_t offset) const noexcept {
      return reinterpret_cast<const T*>(bytes.data + offset);
    }

    CudaBackend* backend;
    Lane* lane;
    Bytes bytes;
  };

  /// A chunk table sorted by type, on the device.
  struct Uploaded {
    DeviceTableBuffer buffer;
    Lane* lane;
    std::array<std::uint32_t, kDTypeCount> count_of_type;
    const cuda::DeviceChunk* chunks;
    const ScaleFactors* factors;
    std::byte* const* targets;  ///< of accumulate, in the order of chunks
  };

  Uploaded upload(const ChunkTable& table, std::span<std::byte* const> targets = {}) {
    std::vector<std::uint32_t> order(table.chunks.size());
    for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return table.chunks[a].dtype < table.chunks[b].dtype; });
    std::vector<cuda::DeviceChunk> chunks;
    std::vector<ScaleFactors> factors;  // of each type that they scale
    std::map<std::pair<DType, std::uint32_t>, std::uint32_t> place_of;
    std::vector<std::byte*> sorted_targets;
    std::array<std::uint32_t, kDTypeCount> count_of_type{};
    for (const std::uint32_t i : order) {
      const Chunk& chunk = table.chunks[i];
      const ScaleFactors& given = checked_factors(table, chunk);
      const auto [place, added] =
          place_of.try_emplace({chunk.dtype, chunk.factors}, static_cast<std::uint32_t>(factors.size()));
      if (added) factors.push_back(without_divisions(chunk.dtype, given));
      chunks.push_back({chunk.data, chunk.count, place->second, i, 0});
      if (!targets.empty()) sorted_targets.push_back(targets[i]);
      ++count_of_type[static_cast<std::size_t>(chunk.dtype)];
    }
    TableBytes bytes;
    const std::size_t chunks_at = bytes.add(std::span<const cuda::DeviceChunk>(chunks));
    const std::size_t factors_at = bytes.add(std::span<const ScaleFactors>(factors));
    const std::size_t targets_at = bytes.add(std::span<std::byte* const>(sorted_targets));
    DeviceTableBuffer buffer(*this, bytes);
    Lane* lane = buffer.lane;
    const auto* chunks_on_device = buffer.at<cuda::DeviceChunk>(chunks_at);
    const auto* factors_on_device = buffer.at<ScaleFactors>(factors_at);
    const auto* targets_on_device = buffer.at<std::byte*>(targets_at);
    return {std::move(buffer), lane, count_of_type, chunks_on_device, factors_on_device, targets_on_device};
  }

  template <typename Launch>
  static void for_each_type(const Uploaded& uploaded, const Launch& launch) {
    std::uint32_t first = 0;
    for (int type = 0; type < kDTypeCount; ++type) {
      const std::uint32_t count = uploaded.count_of_type[static_cast<std::size_t>(type)];
      if (count > 0) launch(static_cast<DType>(type), {uploaded.chunks + first, uploaded.factors, count});
      first += count;
    }
  }

  static const ScaleFactors& checked_factors(const ChunkTable& table, const Chunk& chunk) {
    GRADCLIP_CHECK(chunk.count <= kChunkElements, fmt::format("a chunk of {} elements", chunk.count));
    GRADCLIP_CHECK(chunk.factors < table.factors.size(),
                   fmt::format("factors {} of {}", chunk.factors, table.factors.size()));
    return table.factors[chunk.factors];
  }

  static void check(cudaError_t status, const char* kernel) {
    cuda::check(status, fmt::format("launch of {}", kernel).c_str());
  }

  static cudaMemcpyKind kind(MemorySpace from, MemorySpace to) {
    if (from != MemorySpace::device) return cudaMemcpyHostToDevice;
    return to == MemorySpace::device ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost;
  }

  /// The calling thread's lane; makes the device its current one.
  Lane& lane() {
    cuda::use_device(device_);
    const std::lock_guard lock(mutex_);
    std::unique_ptr<Lane>& mine = lanes_[std::this_thread::get_id()];
    if (!mine) mine = std::make_unique<Lane>();
    return *mine;
  }

  std::byte* device_allocate(std::size_t bytes, const Lane& mine) {
    void* data = nullptr;
    if (pool_ != nullptr) {
      GRADCLIP_CUDA(cudaMallocAsync(&data, bytes, mine.stream()));
    } else {
      GRADCLIP_CUDA(cudaMalloc(&data, bytes));
    }
    const std::uint64_t held = held_ += bytes;
    std::uint64_t peak = peak_;
    while (held > peak && !peak_.compare_exchange_weak(peak, held)) {
    }
    return static_cast<std::byte*>(data);
  }

  void device_release(Bytes owned) noexcept {
    held_ -= owned.size;
    try {
      const Lane& mine = lane();
      cuda::check_quietly(pool_ != nullptr ? cudaFreeAsync(owned.data, mine.stream()) : cudaFree(owned.data));
    } catch (...) {
      cuda::check_quietly(cudaFree(owned.data));  // no stream any more: the device has failed
    }
  }

  int device_;
  std::string name_;
  int major_, minor_;
  std::string identity_;
  std::size_t free_at_start_ = 0;
  cudaMemPool_t pool_ = nullptr;  ///< null where the device has none
  std::atomic<std::uint64_t> held_{0}, peak_{0};
  std::mutex mutex_;
  std::unordered_map<std::thread::id, std::unique_ptr<Lane>> lanes_;
};

/// The device's UUID, which no other device in the world has.
std::string identity_of(const cudaDeviceProp& properties) {
  std::string text = "GPU-";
  for (const char byte : properties.uuid.bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

}  // namespace

ChosenBackend try_cuda_backend(std::size_t process_on_host) {
  const cuda::Devices devices = cuda::usable_devices();
  if (devices.count == 0) return {.backend = nullptr, .reason = devices.why_none};
  const int device = static_cast<int>(process_on_host % static_cast<std::size_t>(devices.count));
  cudaDeviceProp properties{};
  GRADCLIP_CUDA(cudaGetDeviceProperties(&properties, device));
  if (properties.major < kLeastMajor) {
    return {.backend = nullptr,
            .reason = fmt::format("{} has compute capability {}.{}, and the kernels need {}.0 or newer",
                                  properties.name, properties.major, properties.minor, kLeastMajor)};
  }
  return {.backend = std::make_unique<CudaBackend>(device, properties, identity_of(properties)),
          .reason = fmt::format("device {} of {}, by this process's number on its host", device, devices.count)};
}

}  // namespace gradclip
