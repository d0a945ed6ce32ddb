#pragma once
// The threads of one block: fibers, barriers and the exchanges of a warp, with checks that a GPU does not make.

#include <cstdint>
#include <functional>
#include <random>
#include <source_location>
#include <string>
#include <vector>

#include "cuda_emulation.hpp"
#include "fibers.hpp"

namespace emulation {

struct Launch {
  const char* name;
  dim3 grid;
  dim3 block;
  const std::function<void()>* body;
};

/// Runs blocks one after another on the host thread that calls it.
class BlockRunner {
 public:
  ~BlockRunner();

  /// @param index  of the block in the grid, x fastest.
  void run(const Launch& launch, std::uint64_t index);

  bool barrier(bool predicate, const std::source_location& where);
  std::uint64_t exchange(unsigned mask, std::uint64_t value, unsigned source, bool ordered,
                         const std::source_location& where);
  void gather(unsigned mask, std::uint64_t value, std::uint64_t (&values)[kWarpSize],
              const std::source_location& where);

 private:
  enum class State : unsigned char { runnable, at_barrier, in_warp, exited };
  struct Thread {
    Lane lane;
    Context context;
    const std::source_location* where = nullptr;
  };
  /// Lanes that meet at one operation of their warp. It is theirs until the last one has read.
  struct Meeting {
    unsigned mask = 0;
    unsigned arrived = 0;
    unsigned unread = 0;
    const std::source_location* where = nullptr;
    std::uint64_t values[kWarpSize];
  };
  /// Each lane is in one meeting at most, so that there are never more than lanes.
  struct Warp {
    unsigned in_use = 0;
    Meeting meetings[kWarpSize];
  };

  static void thread_main();
  void prepare(const Launch& launch, std::uint64_t index);
  [[nodiscard]] std::size_t next_runnable();
  void leave(std::size_t thread, State state);
  Meeting& meet(unsigned mask, std::uint64_t value, bool ordered, const std::source_location& where);
  Meeting& meeting_for(Warp& warp, unsigned lane, unsigned mask, const std::source_location& where);
  [[noreturn]] void report_deadlock();
  [[noreturn]] void report_partial_barrier(const std::source_location& where);
  [[noreturn]] void report_here(const std::string& message);

  Stacks stacks_;
  std::vector<Thread> threads_;
  std::vector<State> states_;
  std::vector<std::size_t> order_;
  std::vector<Warp> warps_;
  std::mt19937_64 random_;
  Context host_;
  const Launch* launch_ = nullptr;
  std::size_t current_ = 0;
  std::size_t cursor_ = 0;  ///< place in order_
  std::size_t alive_ = 0;
  std::size_t waiting_ = 0;
  unsigned generation_ = 0;              ///< of the barrier
  bool predicates_[2] = {false, false};  ///< of this generation and the last
  // Addresses for publish and observe. Start and end must differ, or each thread would come after the one before.
  char barrier_order_[2] = {}, start_order_ = 0, end_order_ = 0;
};

/// The block that the calling host thread runs.
BlockRunner& running_block();

}  // namespace emulation
