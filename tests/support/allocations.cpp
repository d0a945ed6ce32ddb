#include "allocations.hpp"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::uint64_t> total_count{0};
std::atomic<std::int64_t> total_held{0};
std::atomic<std::int64_t> most_held{0};

void* counted(void* memory) noexcept {
  if (memory == nullptr) return memory;
  total_count.fetch_add(1, std::memory_order_relaxed);
  const auto size = static_cast<std::int64_t>(malloc_usable_size(memory));
  const std::int64_t held = total_held.fetch_add(size, std::memory_order_relaxed) + size;
  std::int64_t most = most_held.load(std::memory_order_relaxed);
  while (held > most && !most_held.compare_exchange_weak(most, held, std::memory_order_relaxed)) {
  }
  return memory;
}

void release(void* memory) noexcept {
  if (memory != nullptr) {
    total_held.fetch_sub(static_cast<std::int64_t>(malloc_usable_size(memory)), std::memory_order_relaxed);
  }
  std::free(memory);
}

}  // namespace

// The array forms call these. Those without exceptions are here too, because a sanitizer has its own.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return counted(std::malloc(size == 0 ? 1 : size));
}
void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  const auto step = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(step, (size + step - 1) / step * step));
}
void* operator new(std::size_t size) {
  void* const memory = operator new(size, std::nothrow);
  return memory != nullptr ? memory : throw std::bad_alloc();
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  void* const memory = operator new(size, alignment, std::nothrow);
  return memory != nullptr ? memory : throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  release(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  release(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  release(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  release(memory);
}

namespace gradclip::test {

Allocations::Allocations() : count_(total_count), held_(total_held) {
  most_held = held_;
}

std::uint64_t Allocations::count() const {
  return total_count - count_;
}

std::uint64_t Allocations::peak_bytes() const {
  return static_cast<std::uint64_t>(most_held - held_);
}

}  // namespace gradclip::test
