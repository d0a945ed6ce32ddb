#pragma once
// Execution contexts with stacks of their own, switched by hand, known to the sanitizers.
//
// EMULATION_TSAN is defined where kernels are compiled with -fsanitize=thread: the emulation itself must not be, or the
// sanitizer would report the scheduler's own data.

#include <cstddef>

namespace emulation {

/// One context. The one of a host thread needs nothing but enter_scheduler().
struct Context {
  void* stack_pointer = nullptr;
  const void* stack_bottom = nullptr;
  std::size_t stack_bytes = 0;
  void* fake_stack = nullptr;  ///< AddressSanitizer's
  void* thread = nullptr;      ///< ThreadSanitizer's
};

/// Stacks of equal size side by side, with an inaccessible page below each.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  /// At least `count` stacks; contexts on earlier ones end.
  void provide(std::size_t count);
  [[nodiscard]] char* bottom(std::size_t index) const;
  [[nodiscard]] static std::size_t bytes(std::size_t index);

 private:
  char* memory_ = nullptr;
  std::size_t count_ = 0;
};

/// Makes the calling host thread's context one that fibers may switch back to.
void enter_scheduler(Context& host);

/// A context that starts in `entry` on the given stack. `entry` calls arrive() first and never returns.
void make_context(Context& context, char* stack_bottom, std::size_t stack_bytes, void (*entry)());
void destroy_context(Context& context);

/// Leaves `from` for `to`. @param ends  `from` is not entered again.
void switch_context(Context& from, Context& to, bool ends);
void arrive();

/// Orders, for ThreadSanitizer, what came before publish(at) before what comes after observe(at).
void publish(void* at);
void observe(void* at);

}  // namespace emulation
