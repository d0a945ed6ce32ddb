#pragma once
// How many bytes may be held, counted by those who hold them.

#include <atomic>
#include <cstddef>
#include <optional>
#include <utility>

namespace gradclip {

/// A limit that several threads take bytes from. Outlives its shares.
class MemoryBudget {
 public:
  explicit MemoryBudget(std::size_t limit) noexcept : limit_(limit) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  /// Bytes that were taken; given back with the object. Move-only.
  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Share& operator=(Share&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;
    ~Share() {
      if (budget_ != nullptr) budget_->used_ -= bytes_;
    }

   private:
    friend class MemoryBudget;
    Share(MemoryBudget* budget, std::size_t bytes) noexcept : budget_(budget), bytes_(bytes) {}

    MemoryBudget* budget_ = nullptr;
    std::size_t bytes_ = 0;
  };

  /// Empty where fewer bytes are left.
  [[nodiscard]] std::optional<Share> take(std::size_t bytes) noexcept {
    std::size_t used = used_;
    do {
      const std::size_t limit = limit_;
      if (used > limit || bytes > limit - used) return std::nullopt;
    } while (!used_.compare_exchange_weak(used, used + bytes));
    return Share(this, bytes);
  }

  /// Less memory is there than the limit says: from now on the limit is what is taken.
  void limit_to_used() noexcept { limit_ = used_.load(); }

  [[nodiscard]] std::size_t limit() const noexcept { return limit_; }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }

 private:
  std::atomic<std::size_t> limit_;
  std::atomic<std::size_t> used_{0};
};

}  // namespace gradclip
