#include "gradclip/base/worker_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace gradclip {

std::size_t available_processors() noexcept {
  // Machines with more than 1024 processors need a larger set than cpu_set_t.
  for (std::size_t processors = 1024; processors <= 1u << 16; processors *= 4) {
    cpu_set_t* set = CPU_ALLOC(processors);
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(processors);
    CPU_ZERO_S(bytes, set);
    const int status = sched_getaffinity(0, bytes, set);
    const int count = status == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return static_cast<std::size_t>(count);
  }
  return std::max<std::size_t>(1, std::thread::hardware_concurrency());
}

void parallel_for(std::size_t count, std::size_t threads,
                  const std::function<void(std::size_t index, std::size_t worker)>& task) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::exception_ptr first_error;

  const auto work = [&](std::size_t worker) {
    while (!stop.load(std::memory_order_relaxed)) {
      const std::size_t index = next.fetch_add(1);
      if (index >= count) return;
      try {
        task(index, worker);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first_error) first_error = std::current_exception();
        stop = true;
      }
    }
  };

  std::vector<std::thread> helpers;
  const std::size_t used = std::min(threads, count);
  helpers.reserve(used);
  try {
    for (std::size_t worker = 1; worker < used; ++worker) helpers.emplace_back(work, worker);
  } catch (const std::system_error&) {
    // Fewer threads than asked for do the same work.
  }
  work(0);
  for (std::thread& helper : helpers) helper.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace gradclip
