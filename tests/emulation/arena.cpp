#include "arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

#include "settings.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) static_cast<void>(0)
#endif

namespace emulation {
namespace {

constexpr std::size_t kReserved = std::size_t{256} << 30;
constexpr std::size_t kAlignment = 256;
constexpr std::size_t kGuard = 256;                  // untouchable bytes behind an allocation, at least
constexpr std::size_t kLateBytes = 64u << 20;        // of freed memory that is not used again yet
constexpr std::size_t kStep = std::size_t{2} << 20;  // of growth: a huge page, or each opening costs a fault per 4 KiB
constexpr int kFill = 0xFF;

std::size_t round_up(std::size_t bytes, std::size_t to) {
  return (bytes + to - 1) / to * to;
}

void* pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr): blocks are numbers until they are used
}

// For the signal handler.
std::atomic<std::uintptr_t> arena_begin, arena_end;
std::atomic<bool> arena_open;
struct sigaction next_handler;

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  if (address >= arena_begin && address < arena_end) {
    char text[160];
    const int length = std::snprintf(
        text, sizeof text, "cuda emulation: %s at %p\n",
        arena_open ? "access outside any allocation of device memory" : "host access to device memory", info->si_addr);
    if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) std::_Exit(1);
    std::abort();
  }
  if ((next_handler.sa_flags & SA_SIGINFO) != 0) {
    next_handler.sa_sigaction(signal, info, context);
  } else if (next_handler.sa_handler != SIG_DFL && next_handler.sa_handler != SIG_IGN) {
    next_handler.sa_handler(signal);
  } else {
    sigaction(SIGSEGV, &next_handler, nullptr);  // the access is tried again and ends the process as it would have
  }
}

}  // namespace

Arena::Arena() {
  void* memory = mmap(nullptr, kReserved + kStep, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) report("cannot reserve addresses for device memory");
  begin_ = used_end_ = writable_end_ = round_up(reinterpret_cast<std::uintptr_t>(memory), kStep);
  end_ = begin_ + kReserved;
  arena_begin = begin_;
  arena_end = end_;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &next_handler);
}

bool Arena::contains(const void* address) const {
  const auto number = reinterpret_cast<std::uintptr_t>(address);
  return number >= begin_ && number < end_;
}

void Arena::open() {
  if (open_++ != 0) return;
  if (writable_end_ != begin_) mprotect(pointer(begin_), writable_end_ - begin_, PROT_READ | PROT_WRITE);
  arena_open = true;
}

void Arena::close() {
  if (--open_ != 0) return;
  if (writable_end_ != begin_) mprotect(pointer(begin_), writable_end_ - begin_, PROT_NONE);
  arena_open = false;
}

bool Arena::grow() {
  const std::uintptr_t grown = round_up(used_end_, kStep);
  const std::size_t added = grown - writable_end_;
  madvise(pointer(writable_end_), added, MADV_HUGEPAGE);
  if (mprotect(pointer(writable_end_), added, PROT_READ | PROT_WRITE) != 0) return false;
  std::memset(pointer(used_end_), kFill, grown - used_end_);
  ASAN_POISON_MEMORY_REGION(pointer(writable_end_), added);
  writable_end_ = grown;
  return true;
}

std::uintptr_t Arena::find_space(std::size_t bytes) {
  const auto fits = [&](const auto& range) { return range.second >= bytes; };
  const auto found = std::find_if(free_.begin(), free_.end(), fits);
  if (found != free_.end()) {
    const auto [begin, available] = *found;
    free_.erase(found);
    if (available > bytes) free_[begin + bytes] = available - bytes;
    return begin;
  }
  if (bytes > end_ - used_end_) return 0;
  const std::uintptr_t begin = used_end_;
  used_end_ += bytes;
  if (used_end_ > writable_end_ && !grow()) return 0;
  return begin;
}

void* Arena::take(std::size_t bytes) {
  const Opened opened(*this);
  const std::size_t whole = round_up(bytes, kAlignment) + kGuard;
  const std::uintptr_t begin = find_space(whole);
  if (begin == 0) return nullptr;
  ASAN_UNPOISON_MEMORY_REGION(pointer(begin), whole);
  std::memset(pointer(begin), kFill, whole);
  ASAN_POISON_MEMORY_REGION(pointer(begin + bytes), whole - bytes);
  return pointer(begin);
}

void Arena::give_back(void* address, std::size_t bytes) {
  const Opened opened(*this);
  const Block block{reinterpret_cast<std::uintptr_t>(address), round_up(bytes, kAlignment) + kGuard};
  ASAN_UNPOISON_MEMORY_REGION(address, block.bytes);
  const auto* const guard = static_cast<const unsigned char*>(address) + bytes;
  if (!std::all_of(guard, guard + block.bytes - bytes, [](unsigned char byte) { return byte == kFill; })) {
    report("a kernel wrote beyond the " + std::to_string(bytes) + " bytes of an allocation");
  }
  std::memset(address, kFill, bytes);
  ASAN_POISON_MEMORY_REGION(address, block.bytes);
  late_.push_back(block);
  late_bytes_ += block.bytes;
  while (late_bytes_ > kLateBytes) {
    late_bytes_ -= late_.front().bytes;
    free_block(late_.front());
    late_.pop_front();
  }
}

void Arena::free_block(Block block) {
  auto [range, added] = free_.emplace(block.begin, block.bytes);
  const auto next = std::next(range);
  if (next != free_.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range == free_.begin()) return;
  const auto before = std::prev(range);
  if (before->first + before->second == range->first) {
    before->second += range->second;
    free_.erase(range);
  }
}

}  // namespace emulation
