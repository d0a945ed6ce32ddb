#include "fibers.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "settings.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMULATION_TSAN)
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#error "the context switch of the emulation is written for x86-64"
#endif

// Saves the registers that a function must preserve, exchanges the stack, restores them.
extern "C" void gradclip_emulation_switch(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.globl gradclip_emulation_switch
.type gradclip_emulation_switch,@function
gradclip_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gradclip_emulation_switch,.-gradclip_emulation_switch
)");

namespace emulation {
namespace {

constexpr int kSavedRegisters = 6;
constexpr std::size_t kStackBytes = std::size_t{256} << 10;  // reserved; only what is touched is used

std::size_t page() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

/// Where the running fiber came from: the sanitizer tells its stack only after the switch.
thread_local Context* previous = nullptr;

void arrived(void* fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, &previous->stack_bottom, &previous->stack_bytes);
#else
  (void)fake_stack;
#endif
}

}  // namespace

Stacks::~Stacks() {
  if (memory_ != nullptr) munmap(memory_, count_ * (kStackBytes + page()));
}

std::size_t Stacks::bytes(std::size_t index) {
  // Tops at different places in their pages, or the frames of all threads would meet in a few sets of the cache.
  return kStackBytes - index % 16 * 256;
}

char* Stacks::bottom(std::size_t index) const {
  return memory_ + index * (kStackBytes + page()) + page();
}

void Stacks::provide(std::size_t count) {
  if (count <= count_) return;
  if (memory_ != nullptr) munmap(memory_, count_ * (kStackBytes + page()));
  void* memory = mmap(nullptr, count * (kStackBytes + page()), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) report("no memory for the stacks of a block");
  memory_ = static_cast<char*>(memory);
  count_ = count;
  for (std::size_t i = 0; i < count; ++i) mprotect(bottom(i) - page(), page(), PROT_NONE);
}

void enter_scheduler([[maybe_unused]] Context& host) {
#if defined(EMULATION_TSAN)
  host.thread = __tsan_get_current_fiber();
#endif
}

void make_context(Context& context, char* stack_bottom, std::size_t stack_bytes, void (*entry)()) {
  context.stack_bottom = stack_bottom;
  context.stack_bytes = stack_bytes;
  context.fake_stack = nullptr;
#if defined(EMULATION_TSAN)
  if (context.thread == nullptr) context.thread = __tsan_create_fiber(0);
#endif
  // What the switch pops: the saved registers, the address it returns to, and the 0 that ends a stack trace.
  const std::size_t beyond = (reinterpret_cast<std::uintptr_t>(stack_bottom) + stack_bytes) % 16;
  void** top = reinterpret_cast<void**>(stack_bottom + stack_bytes - beyond);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  context.stack_pointer = top;
}

void destroy_context([[maybe_unused]] Context& context) {
#if defined(EMULATION_TSAN)
  if (context.thread != nullptr) __tsan_destroy_fiber(context.thread);
  context.thread = nullptr;
#endif
}

void switch_context(Context& from, Context& to, [[maybe_unused]] bool ends) {
  previous = &from;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
#if defined(EMULATION_TSAN)
  __tsan_switch_to_fiber(to.thread, __tsan_switch_to_fiber_no_sync);
#endif
  gradclip_emulation_switch(&from.stack_pointer, to.stack_pointer);
  arrived(from.fake_stack);
}

void arrive() {
  arrived(nullptr);
}

void publish([[maybe_unused]] void* at) {
#if defined(EMULATION_TSAN)
  __tsan_release(at);
#endif
}

void observe([[maybe_unused]] void* at) {
#if defined(EMULATION_TSAN)
  __tsan_acquire(at);
#endif
}

}  // namespace emulation
