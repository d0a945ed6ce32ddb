#include "gradclip/training/gradient_accumulator.hpp"

#include "gradclip/base/error.hpp"

namespace gradclip {

void GradientAccumulator::prepare_for_grad_accumulation() {
  GRADCLIP_CHECK(state_ == State::idle || state_ == State::finished,
                 "the last window of microbatches never ended in a reduction");
  state_ = State::accumulating;
  first_microbatch_ = true;
  optim_step_ = requires_sync_ = last_is_done_ = false;
  microbatches_ = 0;
  count_.reset();
}

void GradientAccumulator::prepare_after_first_microbatch() {
  GRADCLIP_CHECK(first_microbatch_ && microbatches_ == 1, "not after the first microbatch");
  first_microbatch_ = false;
}

void GradientAccumulator::prepare_for_final_backward() {
  GRADCLIP_CHECK((state_ == State::accumulating || state_ == State::synchronised) && !optim_step_,
                 "no step that is to end");
  optim_step_ = requires_sync_ = true;
}

void GradientAccumulator::set_requires_gradient_sync(bool requires_sync) {
  GRADCLIP_CHECK((state_ == State::accumulating || state_ == State::synchronised) && !last_is_done_,
                 "no backward that is to come");
  requires_sync_ = requires_sync;
}

void GradientAccumulator::begin_backward() {
  GRADCLIP_CHECK((state_ == State::accumulating || state_ == State::synchronised) && !last_is_done_,
                 "a backward outside of a step");
  GRADCLIP_CHECK(microbatches_ == 0 || !first_microbatch_, "the second microbatch is called the first");
  if (state_ == State::synchronised) count_.reset();
  state_ = State::accumulating;
}

void GradientAccumulator::end_backward() noexcept {
  ++microbatches_;
  last_is_done_ = optim_step_;
  if (requires_sync_) state_ = last_is_done_ ? State::finished : State::synchronised;
}

void GradientAccumulator::backward(const Chunk& gradient, float scale_inv) {
  begin_backward();
  GRADCLIP_CHECK(!count_ || *count_ == gradient.count, "gradients of several sizes in one window");
  const std::size_t bytes = gradient.count * size_of(dtype_);
  if (!count_ && buffer_.size() < bytes) buffer_ = backend_.allocate(bytes, backend_.describe().working_space);
  ScaleFactors factors;
  factors.scale_inv = scale_inv;
  Chunk from = gradient;
  from.factors = 0;
  const Chunk into{buffer_.data(), gradient.count, dtype_, 0};
  backend_.accumulate({&into, 1}, {{&from, 1}, {&factors, 1}}, count_ ? AccumulateStep::add : AccumulateStep::assign);
  backend_.wait(UnusedMemory::keep);  // the caller's bytes are free again
  count_ = gradient.count;
  end_backward();
}

void GradientAccumulator::backward_without_gradient() {
  begin_backward();
  end_backward();
}

Chunk GradientAccumulator::accumulated() const {
  GRADCLIP_CHECK(synchronises() && count_, "nothing is to be reduced");
  return {buffer_.data(), *count_, dtype_, 0};
}

}  // namespace gradclip
