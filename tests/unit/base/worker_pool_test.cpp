#include "gradclip/base/worker_pool.hpp"

#include <gmock/gmock.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

namespace gradclip {
namespace {

TEST(ParallelFor, runs_every_index_once) {
  for (const std::size_t threads : {1u, 2u, 3u, 16u}) {
    for (const std::size_t count : {0u, 1u, 2u, 7u, 1000u}) {
      std::vector<std::atomic<int>> times(count);
      parallel_for(count, threads, [&](std::size_t index, std::size_t) { ++times[index]; });
      EXPECT_TRUE(std::all_of(times.begin(), times.end(), [](const auto& t) { return t == 1; }))
          << threads << " threads, " << count << " tasks";
    }
  }
}

TEST(ParallelFor, one_thread_is_the_caller_in_ascending_order) {
  std::vector<std::size_t> order;
  parallel_for(100, 1, [&, caller = std::this_thread::get_id()](std::size_t index, std::size_t worker) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(worker, 0u);
    order.push_back(index);
  });
  std::vector<std::size_t> expected(100);
  std::iota(expected.begin(), expected.end(), std::size_t{0});
  EXPECT_EQ(order, expected);
}

TEST(ParallelFor, hands_out_indices_in_ascending_order_to_each_worker) {
  constexpr std::size_t kThreads = 4;
  std::vector<std::vector<std::size_t>> seen(kThreads);
  parallel_for(2000, kThreads, [&](std::size_t index, std::size_t worker) { seen[worker].push_back(index); });
  for (const auto& indices : seen) EXPECT_TRUE(std::is_sorted(indices.begin(), indices.end()));
}

TEST(ParallelFor, no_two_tasks_share_a_worker_at_once) {
  constexpr std::size_t kThreads = 5;
  std::vector<std::atomic<int>> busy(kThreads);
  std::atomic<bool> shared{false};
  parallel_for(500, kThreads, [&](std::size_t, std::size_t worker) {
    ASSERT_LT(worker, kThreads);
    if (busy[worker].exchange(1) != 0) shared = true;
    std::this_thread::yield();
    busy[worker] = 0;
  });
  EXPECT_FALSE(shared);
}

TEST(ParallelFor, tasks_run_at_the_same_time) {
  // Each of three tasks waits for the two others; with fewer threads this would not end in time.
  std::atomic<int> arrived{0};
  std::atomic<bool> met{true};
  parallel_for(3, 3, [&](std::size_t, std::size_t) {
    ++arrived;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (arrived < 3) {
      if (std::chrono::steady_clock::now() > until) {
        met = false;
        return;
      }
      std::this_thread::yield();
    }
  });
  EXPECT_TRUE(met);
}

TEST(ParallelFor, more_threads_than_tasks) {
  std::atomic<std::size_t> largest{0};
  std::atomic<int> runs{0};
  parallel_for(2, 64, [&](std::size_t, std::size_t worker) {
    ++runs;
    std::size_t seen = largest;
    while (worker > seen && !largest.compare_exchange_weak(seen, worker)) {
    }
  });
  EXPECT_EQ(runs, 2);
  EXPECT_LT(largest, 64u);
}

TEST(ParallelFor, the_first_error_stops_the_rest_and_is_rethrown) {
  for (const std::size_t threads : {1u, 4u}) {
    constexpr std::size_t kCount = 100000;
    std::atomic<std::size_t> runs{0};
    try {
      parallel_for(kCount, threads, [&](std::size_t index, std::size_t) {
        ++runs;
        if (index == 10) throw std::runtime_error("task 10");
        if (index > 10) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
      ADD_FAILURE() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "task 10");
    }
    if (threads == 1) {
      EXPECT_EQ(runs, 11u);
    } else {
      EXPECT_LT(runs, kCount / 2);
    }
  }
}

TEST(ParallelFor, later_errors_are_dropped_and_nothing_runs_any_more_afterwards) {
  std::atomic<int> inside{0};
  std::atomic<int> started{0};
  const auto task = [&](std::size_t index, std::size_t) {
    ++inside;
    ++started;
    while (started < 3) std::this_thread::yield();  // all three are running before the first one fails
    if (index != 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    --inside;
    throw std::runtime_error(std::to_string(index));
  };
  try {
    parallel_for(3, 3, task);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "0");
  }
  EXPECT_EQ(inside, 0);
}

TEST(ParallelFor, an_error_of_any_type_comes_through) {
  EXPECT_THROW(parallel_for(4, 2, [](std::size_t, std::size_t) { throw 7; }), int);
}

TEST(AvailableProcessors, follows_the_affinity_mask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(available_processors(), static_cast<std::size_t>(CPU_COUNT(&before)));

  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(available_processors(), 1u);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(available_processors(), static_cast<std::size_t>(CPU_COUNT(&before)));
}

}  // namespace
}  // namespace gradclip
