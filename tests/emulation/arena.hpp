#pragma once
// The addresses of all device memory: one reserved range, inaccessible except while the emulated devices work.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>

namespace emulation {

/// Not thread-safe: used under the machine's lock.
class Arena {
 public:
  Arena();

  /// `bytes` at a multiple of 256, filled with 0xFF (NaN as every float), behind them a zone that nothing may touch.
  /// Null if the range is used up.
  void* take(std::size_t bytes);

  /// Takes back what take() gave. Writes beyond its end are reported here, or by AddressSanitizer when they happen. The
  /// addresses come back late, so that a use after the end is noticed.
  void give_back(void* address, std::size_t bytes);

  /// Whether the address is one of device memory, in use or not.
  [[nodiscard]] bool contains(const void* address) const;

  /// While open, kernels and copies may use the memory. Nests.
  void open();
  void close();

 private:
  struct Block {
    std::uintptr_t begin;
    std::size_t bytes;
  };
  /// Where `bytes` are free; 0: nowhere. @pre open
  std::uintptr_t find_space(std::size_t bytes);
  bool grow();
  void free_block(Block block);

  std::uintptr_t begin_ = 0;
  std::uintptr_t end_ = 0;
  std::uintptr_t used_end_ = 0;      ///< no block was ever behind it
  std::uintptr_t writable_end_ = 0;  ///< what open() opens
  int open_ = 0;
  std::map<std::uintptr_t, std::size_t> free_;
  std::deque<Block> late_;  ///< given back, not yet free
  std::size_t late_bytes_ = 0;
};

/// Device memory may be used while one of these lives.
class Opened {
 public:
  explicit Opened(Arena& arena) : arena_(arena) { arena_.open(); }
  ~Opened() { arena_.close(); }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

 private:
  Arena& arena_;
};

}  // namespace emulation
