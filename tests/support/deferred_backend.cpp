#include "deferred_backend.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "gradclip/base/error.hpp"

namespace gradclip::test {
namespace {

[[noreturn]] void fail(const char* why) {
  throw Error(ExitCode::resources, {.where = "deferred device", .found = why, .expected = {}, .advice = {}});
}

/// No two threads have the same, not even one after another.
std::uint64_t this_thread() {
  static std::atomic<std::uint64_t> next{0};
  thread_local const std::uint64_t mine = next++;
  return mine;
}

}  // namespace

/// A chunk table of its own: the caller may reuse its spans when the call returns.
class DeferredBackend::Table {
 public:
  explicit Table(const ChunkTable& table)
      : chunks_(table.chunks.begin(), table.chunks.end()), factors_(table.factors.begin(), table.factors.end()) {}

  [[nodiscard]] ChunkTable get() const { return {chunks_, factors_}; }
  void touches(std::vector<Range>& ranges, bool written) const {
    for (const Chunk& chunk : chunks_) ranges.push_back({chunk.data, chunk.count * size_of(chunk.dtype), written});
  }

 private:
  std::vector<Chunk> chunks_;
  std::vector<ScaleFactors> factors_;
};

DeferredBackend::~DeferredBackend() = default;

BackendDescription DeferredBackend::describe() const {
  BackendDescription description;
  description.device = "deferred";
  description.working_space = MemorySpace::device;
  description.identity = "deferred:0";
  description.device_memory = limit_;
  description.device_memory_peak = device_peak_;
  return description;
}

bool DeferredBackend::count_call(bool asynchronous) {
  const std::size_t call = calls_++;
  const bool fails = call == failing_call_ || (failure_ == Failure::forever && call > failing_call_);
  if (!fails) return false;
  if (failure_ == Failure::late && asynchronous) return true;
  if (failure_ == Failure::forever) {
    const std::lock_guard lock(mutex_);
    lost_ = true;
  }
  fail("a failure of the test");
}

Buffer DeferredBackend::allocate(std::size_t bytes, MemorySpace space) {
  static_cast<void>(count_call(/*asynchronous=*/false));
  const std::lock_guard lock(mutex_);
  if (space == MemorySpace::device && device_bytes_ + bytes > limit_) fail("out of memory");
  Buffer real = real_->allocate(std::max<std::size_t>(bytes, 1), MemorySpace::host);
  std::byte* const data = real.data();
  std::memset(data, 0xFF, real.size());
  if (space == MemorySpace::device) {
    device_bytes_ += bytes;
    device_peak_ = std::max<std::size_t>(device_peak_, device_bytes_);
  } else if (space == MemorySpace::pinned) {
    pinned_bytes_ += bytes;
  }
  buffers_.emplace(data, std::move(real));
  // Others may use it after this thread's next wait.
  pending_[this_thread()].push_back({[] {}, {{data, bytes, true}}, Operation::Kind::allocation});
  ++live_buffers_;
  return Buffer({data, bytes, space}, [this](Bytes owned) { release(owned); });
}

void DeferredBackend::release(Bytes bytes) noexcept {
  const std::lock_guard lock(mutex_);
  Operation operation{[this, bytes] {
                        if (bytes.space == MemorySpace::device) device_bytes_ -= bytes.size;
                        if (bytes.space == MemorySpace::pinned) pinned_bytes_ -= bytes.size;
                        buffers_.erase(bytes.data);
                      },
                      {{bytes.data, bytes.size, true}},
                      Operation::Kind::release};
  --live_buffers_;
  if (!lost_) check_against_others(operation, "released");
  const auto mine = pending_.find(this_thread());
  if (mine == pending_.end() || mine->second.empty() || lost_) {
    operation.run();
  } else {
    mine->second.push_back(std::move(operation));
  }
}

void DeferredBackend::check_against_others(const Operation& operation, const char* what) {
  for (const auto& [thread, operations] : pending_) {
    if (thread == this_thread()) continue;
    for (const Operation& other : operations) {
      for (const Range& theirs : other.touches) {
        for (const Range& mine : operation.touches) {
          const bool apart = mine.begin + mine.size <= theirs.begin || theirs.begin + theirs.size <= mine.begin;
          if (apart || mine.size == 0 || theirs.size == 0 || !(mine.written || theirs.written)) continue;
          violations_.push_back(std::string("bytes of another thread's pending call were ") + what);
          return;
        }
      }
    }
  }
}

void DeferredBackend::defer(Operation operation, bool fails) {
  const std::lock_guard lock(mutex_);
  check_against_others(operation, "used");
  if (fails) operation.run = [] { fail("a late failure of the test"); };
  pending_[this_thread()].push_back(std::move(operation));
}

void DeferredBackend::finish_calls_of_this_thread() {
  const std::lock_guard lock(mutex_);
  std::vector<Operation> operations = std::exchange(pending_[this_thread()], {});
  std::exception_ptr failure;
  for (const Operation& operation : operations) {
    if ((failure || lost_) && operation.kind != Operation::Kind::release) continue;
    try {
      operation.run();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void DeferredBackend::move(Bytes from, Bytes to) {
  GRADCLIP_CHECK(from.size == to.size, "unequal sizes");
  const bool at_once = from.space == MemorySpace::host || to.space == MemorySpace::host;
  const bool fails = count_call(!at_once);
  if (from.space != MemorySpace::device && to.space == MemorySpace::device) uploaded_ += from.size;
  if (from.space == MemorySpace::device && to.space != MemorySpace::device) downloaded_ += from.size;
  defer({[from, to] {
           if (from.size != 0) std::memcpy(to.data, from.data, from.size);
         },
         {{from.data, from.size, false}, {to.data, to.size, true}}},
        fails);
  if (at_once) finish_calls_of_this_thread();
}

void DeferredBackend::wait(UnusedMemory unused) {
  if (unused == UnusedMemory::release) ++releases_;
  static_cast<void>(count_call(/*asynchronous=*/false));
  finish_calls_of_this_thread();
}

void DeferredBackend::statistics(const ChunkTable& table, const StatisticsRequest& request, Bytes out) {
  GRADCLIP_CHECK(out.space == MemorySpace::device, "results are not in the working space");
  const bool fails = count_call(/*asynchronous=*/true);
  const Table copy(table);
  Operation operation{[this, copy, request, out] { real_->statistics(copy.get(), request, out); },
                      {{out.data, out.size, true}}};
  copy.touches(operation.touches, false);
  defer(std::move(operation), fails);
}

void DeferredBackend::scale(const ChunkTable& table) {
  const bool fails = count_call(/*asynchronous=*/true);
  const Table copy(table);
  Operation operation{[this, copy] { real_->scale(copy.get()); }, {}};
  copy.touches(operation.touches, true);
  defer(std::move(operation), fails);
}

void DeferredBackend::combine(std::span<const ChunkTable> addends, PartialOperation operation, double divisor,
                              Bytes out) {
  const bool fails = count_call(/*asynchronous=*/true);
  const std::vector<Table> copies(addends.begin(), addends.end());
  Operation deferred{[this, copies, operation, divisor, out] {
                       std::vector<ChunkTable> tables;
                       for (const Table& copy : copies) tables.push_back(copy.get());
                       real_->combine(tables, operation, divisor, out);
                     },
                     {{out.data, out.size, true}}};
  for (const Table& copy : copies) copy.touches(deferred.touches, false);
  defer(std::move(deferred), fails);
}

void DeferredBackend::accumulate(std::span<const Chunk> into, const ChunkTable& from, AccumulateStep step) {
  const bool fails = count_call(/*asynchronous=*/true);
  const Table target(ChunkTable{into, {}}), copy(from);
  Operation operation{[this, target, copy, step] { real_->accumulate(target.get().chunks, copy.get(), step); }, {}};
  target.touches(operation.touches, true);
  copy.touches(operation.touches, false);
  defer(std::move(operation), fails);
}

std::vector<std::string> DeferredBackend::violations() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all = violations_;
  for (const auto& [thread, operations] : pending_) {
    const bool unfinished = std::any_of(operations.begin(), operations.end(), [](const Operation& operation) {
      return operation.kind == Operation::Kind::call;
    });
    if (unfinished && !lost_) all.emplace_back("a call was never waited for");
  }
  return all;
}

}  // namespace gradclip::test
