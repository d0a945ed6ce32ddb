#pragma once
// Threads for independent tasks.

#include <cstddef>
#include <functional>

namespace gradclip {

/// Number of processors that this process may run on: its affinity mask, so that a process that a launcher bound to one
/// core does not start sixty threads. At least 1.
[[nodiscard]] std::size_t available_processors() noexcept;

/// Runs `task(index, worker)` for every index in [0, count) on up to `threads` threads (the caller is one of them).
/// Indices are handed out in ascending order, one at a time; `worker` is in [0, threads) and no two tasks with the same
/// worker run at once, so that it can name a buffer. The first exception stops the handing out and is rethrown here
/// once every thread has come to rest; later exceptions are dropped.
/// @pre threads >= 1.
void parallel_for(std::size_t count, std::size_t threads,
                  const std::function<void(std::size_t index, std::size_t worker)>& task);

}  // namespace gradclip
