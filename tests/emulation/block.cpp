#include "block.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>

#include "settings.hpp"

namespace emulation {

constinit thread_local const Lane* running = nullptr;

namespace {

thread_local BlockRunner* the_block = nullptr;

bool same(const std::source_location& a, const std::source_location& b) {
  if (a.line() != b.line()) return false;
  return a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0;
}

std::string text(const std::source_location& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line());
}

std::string text(const uint3& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

uint3 index_in(std::uint64_t linear, dim3 size) {
  return {static_cast<unsigned>(linear % size.x), static_cast<unsigned>(linear / size.x % size.y),
          static_cast<unsigned>(linear / size.x / size.y)};
}

}  // namespace

BlockRunner& running_block() {
  if (the_block == nullptr) report("a device function was called outside a kernel");
  return *the_block;
}

BlockRunner::~BlockRunner() {
  for (Thread& thread : threads_) destroy_context(thread.context);
}

void BlockRunner::prepare(const Launch& launch, std::uint64_t index) {
  const std::size_t count = std::size_t{launch.block.x} * launch.block.y * launch.block.z;
  if (threads_.size() != count) {
    for (Thread& thread : threads_) destroy_context(thread.context);
    threads_ = std::vector<Thread>(count);
    warps_ = std::vector<Warp>((count + kWarpSize - 1) / kWarpSize);
    stacks_.provide(count);
  }
  launch_ = &launch;
  states_.assign(count, State::runnable);
  order_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    order_[i] = settings().order == 1 ? count - 1 - i : i;
    Thread& thread = threads_[i];
    thread.lane = {index_in(i, launch.block), index_in(index, launch.grid), launch.block, launch.grid,
                   static_cast<unsigned>(i)};
    make_context(thread.context, stacks_.bottom(i), Stacks::bytes(i), &BlockRunner::thread_main);
  }
  random_.seed(settings().order * 7919 + index);
  if (settings().order > 1) std::shuffle(order_.begin(), order_.end(), random_);
  cursor_ = 0;
  alive_ = count;
  waiting_ = 0;
  predicates_[0] = predicates_[1] = false;
}

void BlockRunner::run(const Launch& launch, std::uint64_t index) {
  prepare(launch, index);
  the_block = this;
  enter_scheduler(host_);
  publish(&start_order_);
  current_ = next_runnable();
  running = &threads_[current_].lane;
  switch_context(host_, threads_[current_].context, false);
  observe(&end_order_);
  running = nullptr;
  the_block = nullptr;
}

void BlockRunner::thread_main() {
  arrive();
  BlockRunner& block = *the_block;
  observe(&block.start_order_);
  (*block.launch_->body)();
  publish(&block.end_order_);
  --block.alive_;
  block.leave(block.current_, State::exited);
  std::abort();
}

/// The next thread in the order that the environment asks for.
std::size_t BlockRunner::next_runnable() {
  for (int pass = 0; pass < 2; ++pass) {  // the rest of the order, then all of it
    while (cursor_ < order_.size()) {
      const std::size_t thread = order_[cursor_++];
      if (states_[thread] == State::runnable) return thread;
    }
    cursor_ = 0;
    if (settings().order > 1) std::shuffle(order_.begin(), order_.end(), random_);
  }
  report_deadlock();
}

/// Gives the processor to another thread, from fiber to fiber: half the switches of a way over the scheduler.
void BlockRunner::leave(std::size_t thread, State state) {
  states_[thread] = state;
  const bool ends = state == State::exited;
  if (ends && alive_ == 0) switch_context(threads_[thread].context, host_, true);
  current_ = next_runnable();
  running = &threads_[current_].lane;
  switch_context(threads_[thread].context, threads_[current_].context, ends);
}

bool BlockRunner::barrier(bool predicate, const std::source_location& where) {
  const std::size_t me = current_;
  const unsigned parity = generation_ & 1u;
  threads_[me].where = &where;
  predicates_[parity] |= predicate;
  publish(&barrier_order_[parity]);
  if (++waiting_ < alive_) {
    leave(me, State::at_barrier);
  } else {
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      if (states_[i] == State::at_barrier && !same(*threads_[i].where, where)) {
        report_here("threads of one block wait at different barriers: " + text(where) + " and " +
                    text(*threads_[i].where));
      }
    }
    if (alive_ != threads_.size()) report_partial_barrier(where);
    waiting_ = 0;
    ++generation_;
    predicates_[generation_ & 1u] = false;
    std::replace(states_.begin(), states_.end(), State::at_barrier, State::runnable);
  }
  observe(&barrier_order_[parity]);
  return predicates_[parity];
}

BlockRunner::Meeting& BlockRunner::meeting_for(Warp& warp, unsigned lane, unsigned mask,
                                               const std::source_location& where) {
  for (unsigned rest = warp.in_use; rest != 0; rest &= rest - 1) {
    Meeting& meeting = warp.meetings[std::countr_zero(rest)];
    if (meeting.arrived == meeting.mask) continue;  // complete, though not yet read by all
    if (meeting.mask == mask && same(*meeting.where, where)) return meeting;
    const bool awaits_me = (meeting.mask >> lane & 1u) != 0;
    if (awaits_me && (meeting.arrived & mask) != 0) {
      report_here("lanes of one warp wait for each other at different operations: " + text(where) + " and " +
                  text(*meeting.where));
    }
  }
  Meeting& meeting = warp.meetings[std::countr_one(warp.in_use)];
  warp.in_use |= warp.in_use + 1;
  meeting.mask = meeting.unread = mask;
  meeting.arrived = 0;
  meeting.where = &where;
  return meeting;
}

BlockRunner::Meeting& BlockRunner::meet(unsigned mask, std::uint64_t value, bool ordered,
                                        const std::source_location& where) {
  const std::size_t me = current_;
  const std::size_t first = me / kWarpSize * kWarpSize;
  const unsigned lane = static_cast<unsigned>(me - first);
  const std::size_t lanes = std::min<std::size_t>(kWarpSize, threads_.size() - first);
  if ((mask >> lane & 1u) == 0) report_here("lane " + std::to_string(lane) + " is not in its own mask, " + text(where));
  if (lanes < kWarpSize && mask >> lanes != 0)
    report_here("the mask names lanes that the block does not have, " + text(where));

  threads_[me].where = &where;
  Warp& warp = warps_[me / kWarpSize];
  Meeting& meeting = meeting_for(warp, lane, mask, where);
  meeting.values[lane] = value;
  meeting.arrived |= 1u << lane;
  // Only __syncwarp orders memory; a shuffle exchanges registers.
  if (ordered) publish(&meeting);
  if (meeting.arrived != mask) {
    leave(me, State::in_warp);
  } else {
    for (std::size_t i = 0; i < lanes; ++i) {
      if (mask >> i & 1u) states_[first + i] = State::runnable;
    }
  }
  if (ordered) observe(&meeting);
  meeting.unread &= ~(1u << lane);
  if (meeting.unread == 0) warp.in_use &= ~(1u << (&meeting - warp.meetings));
  return meeting;
}

std::uint64_t BlockRunner::exchange(unsigned mask, std::uint64_t value, unsigned source, bool ordered,
                                    const std::source_location& where) {
  if ((mask >> source & 1u) == 0) report_here("a lane outside the mask is read, " + text(where));
  return meet(mask, value, ordered, where).values[source];
}

void BlockRunner::gather(unsigned mask, std::uint64_t value, std::uint64_t (&values)[kWarpSize],
                         const std::source_location& where) {
  const Meeting& meeting = meet(mask, value, false, where);
  std::copy(std::begin(meeting.values), std::end(meeting.values), values);
}

void BlockRunner::report_here(const std::string& message) {
  report(message + "\n  in kernel " + launch_->name + ", block " + text(threads_[0].lane.block));
}

void BlockRunner::report_partial_barrier(const std::source_location& where) {
  report_here("barrier at " + text(where) + " reached by " + std::to_string(alive_) + " of " +
              std::to_string(threads_.size()) + " threads; the others have returned");
}

void BlockRunner::report_deadlock() {
  if (waiting_ == alive_) {
    const auto at_barrier = std::find(states_.begin(), states_.end(), State::at_barrier);
    report_partial_barrier(*threads_[static_cast<std::size_t>(at_barrier - states_.begin())].where);
  }
  std::map<std::string, int> places;
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    if (states_[i] == State::exited) {
      ++places["returned"];
    } else {
      ++places[(states_[i] == State::at_barrier ? "at the barrier " : "in the warp operation ") +
               text(*threads_[i].where)];
    }
  }
  std::string message = "deadlock of the threads of a block:";
  for (const auto& [place, count] : places) message += "\n  " + std::to_string(count) + " threads " + place;
  report_here(message);
}

bool block_barrier(bool predicate, const std::source_location& where) {
  return running_block().barrier(predicate, where);
}

std::uint64_t warp_exchange(unsigned mask, std::uint64_t value, unsigned source, bool ordered,
                            const std::source_location& where) {
  return running_block().exchange(mask, value, source, ordered, where);
}

void warp_gather(unsigned mask, std::uint64_t value, std::uint64_t (&values)[kWarpSize],
                 const std::source_location& where) {
  running_block().gather(mask, value, values, where);
}

}  // namespace emulation
