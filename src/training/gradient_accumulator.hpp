#pragma once
// One rank's gradient over the microbatches of a step, in the three preparations of the training loop.

#include <cstdint>
#include <optional>

#include "gradclip/backend/backend.hpp"

namespace gradclip {

/// What a rank keeps of a gradient between backward passes under FSDP2: unsharded, in the reduce type, until a backward
/// synchronises. The first gradient of such a window is converted to it, the next ones are added there.
///
/// The loop that it replays, which is refused in any other order (Error(bug): a caller's mistake):
///
///   prepare_for_grad_accumulation();
///   for each microbatch:
///     if it is the last: prepare_for_final_backward();
///     backward(gradient), or backward_without_gradient();
///     if synchronises(): reduce accumulated();
///     if it is the first: prepare_after_first_microbatch();
class GradientAccumulator {
 public:
  GradientAccumulator(Backend& backend, DType reduce_dtype) : backend_(backend), dtype_(reduce_dtype) {}

  /// Reference: prepare_for_grad_accumulation: not the optimizer step, the first microbatch, no synchronisation.
  void prepare_for_grad_accumulation();
  /// Reference: prepare_after_first_microbatch: later ones reuse cached FP8 weights.
  void prepare_after_first_microbatch();
  /// Reference: prepare_for_final_backward: the optimizer step; the next backward synchronises.
  void prepare_for_final_backward();
  /// As FSDP2's method: whether the next backward ends in a reduction. The preparations set it for deferred
  /// synchronisation; other windows set it before each backward, after them.
  void set_requires_gradient_sync(bool requires_sync);

  /// @param gradient   in the backend's working space; as many elements in every microbatch of a window
  /// @param scale_inv  of float8
  void backward(const Chunk& gradient, float scale_inv = 1.0F);
  /// The same for a gradient that is None.
  void backward_without_gradient();

  [[nodiscard]] bool is_first_microbatch() const noexcept { return first_microbatch_; }
  [[nodiscard]] bool is_optim_step() const noexcept { return optim_step_; }
  /// Whether the last backward ended a window, whose gradient is to be reduced.
  [[nodiscard]] bool synchronises() const noexcept {
    return state_ == State::synchronised || state_ == State::finished;
  }
  [[nodiscard]] std::uint64_t microbatches() const noexcept { return microbatches_; }  ///< of this step so far
  /// Whether every gradient of the window was None.
  [[nodiscard]] bool none() const noexcept { return !count_; }
  /// The window's gradient in the reduce type, until the next backward. @pre synchronises(), not none()
  [[nodiscard]] Chunk accumulated() const;

 private:
  enum class State : std::uint8_t {
    idle,          ///< outside of a step
    accumulating,  ///< a window is open
    synchronised,  ///< a window has ended, another may follow
    finished,      ///< the step's last window has ended
  };

  void begin_backward();
  void end_backward() noexcept;

  Backend& backend_;
  DType dtype_;
  Buffer buffer_;
  State state_ = State::idle;
  bool first_microbatch_ = false;
  bool optim_step_ = false;
  bool requires_sync_ = false;
  bool last_is_done_ = false;  ///< the optimizer step's backward
  std::uint64_t microbatches_ = 0;
  std::optional<std::uint32_t> count_;  ///< elements; empty: every gradient was None so far
};

}  // namespace gradclip
