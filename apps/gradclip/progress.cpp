#include "progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "gradclip/report/text.hpp"

namespace gradclip {
namespace {

constexpr std::chrono::milliseconds kMovingInterval{200};
constexpr std::chrono::milliseconds kLineInterval{10'000};

}  // namespace

void Progress::begin(double total_bytes) {
  total_bytes_ = total_bytes;
  done_bytes_ = 0;
  start_ = std::chrono::steady_clock::now();
  next_milliseconds_ = mode_ == Mode::moving ? kMovingInterval.count() : kLineInterval.count();
}

void Progress::add(std::uint64_t bytes) noexcept {
  if (mode_ == Mode::off) return;
  done_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  const auto now = static_cast<std::int64_t>(elapsed.count() * 1000.0);
  std::int64_t next = next_milliseconds_.load(std::memory_order_relaxed);
  if (now < next) return;
  const std::int64_t interval = mode_ == Mode::moving ? kMovingInterval.count() : kLineInterval.count();
  if (next_milliseconds_.compare_exchange_strong(next, now + interval)) show(elapsed.count());
}

void Progress::show(double seconds) noexcept {
  try {
    const auto done = static_cast<double>(done_bytes_.load(std::memory_order_relaxed));
    const double part = total_bytes_ > 0.0 ? std::min(done / total_bytes_, 0.99) : 0.0;
    const std::string text = fmt::format("gradclip: {:.0f} %, {} at {}/s", 100.0 * part, human_bytes(done),
                                         human_bytes(done / std::max(seconds, 1e-3)));
    const std::lock_guard lock(mutex_);
    if (mode_ == Mode::moving) {
      std::fprintf(stderr, "\r%s\x1b[K", text.c_str());
      on_screen_ = true;
    } else {
      std::fprintf(stderr, "%s\n", text.c_str());
    }
    std::fflush(stderr);
  } catch (...) {
    // A progress line is never worth a failed run.
  }
}

void Progress::end() noexcept {
  const std::lock_guard lock(mutex_);
  if (on_screen_) {
    std::fputs("\r\x1b[K", stderr);
    std::fflush(stderr);
  }
  on_screen_ = false;
  mode_ = Mode::off;
}

}  // namespace gradclip
