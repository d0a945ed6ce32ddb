#pragma once

#include <cstdint>

namespace gradclip::test {

/// What operator new was asked for, by all threads, from construction on: growth is judged by memory and the number of
/// allocations, which are the same on every machine and under any load, never by time. Link allocations.cpp.
class Allocations {
 public:
  Allocations();

  [[nodiscard]] std::uint64_t count() const;  ///< allocations
  [[nodiscard]] std::uint64_t peak_bytes()
      const;  ///< the most that was held at once, beyond what was held at the start

 private:
  std::uint64_t count_;
  std::int64_t held_;
};

}  // namespace gradclip::test
