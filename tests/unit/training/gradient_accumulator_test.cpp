// The three preparations, in their order and in any other.

#include "gradclip/training/gradient_accumulator.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "gradclip/base/error.hpp"

namespace gradclip::test {
namespace {

class Accumulator : public testing::Test {
 protected:
  void backward(std::vector<float> gradient) {
    accumulator_.backward({reinterpret_cast<std::byte*>(gradient.data()), static_cast<std::uint32_t>(gradient.size()),
                           DType::float32, 0});
  }
  /// The training loop over these gradients.
  void window(const std::vector<std::vector<float>>& gradients) {
    accumulator_.prepare_for_grad_accumulation();
    for (std::size_t k = 0; k < gradients.size(); ++k) {
      EXPECT_EQ(accumulator_.is_first_microbatch(), k == 0);
      EXPECT_FALSE(accumulator_.synchronises());
      if (k + 1 == gradients.size()) accumulator_.prepare_for_final_backward();
      EXPECT_EQ(accumulator_.is_optim_step(), k + 1 == gradients.size());
      backward(gradients[k]);
      if (k == 0) accumulator_.prepare_after_first_microbatch();
    }
    EXPECT_TRUE(accumulator_.synchronises());
  }
  std::vector<float> accumulated() {
    const Chunk chunk = accumulator_.accumulated();
    const auto* values = reinterpret_cast<const float*>(chunk.data);
    return {values, values + chunk.count};
  }

  std::unique_ptr<Backend> backend_ = make_backend(DeviceChoice::cpu).backend;
  GradientAccumulator accumulator_{*backend_, DType::float32};
};

#define EXPECT_REFUSED(statement) EXPECT_THROW(statement, Error)

TEST_F(Accumulator, AddsTheMicrobatchesOfAWindow) {
  window({{1, 2}, {10, 20}, {100, 200}});
  EXPECT_EQ(accumulated(), (std::vector<float>{111, 222}));
  EXPECT_EQ(accumulator_.microbatches(), 3u);
}

TEST_F(Accumulator, OneMicrobatchIsFirstAndLast) {
  window({{1, 2}});
  EXPECT_EQ(accumulated(), (std::vector<float>{1, 2}));
}

TEST_F(Accumulator, ANewWindowBeginsWithNothing) {
  window({{1, 2}, {3, 4}});
  window({{5, 6, 7}});
  EXPECT_EQ(accumulated(), (std::vector<float>{5, 6, 7}));
}

TEST_F(Accumulator, AWindowMayEndAtAnyMicrobatch) {
  accumulator_.prepare_for_grad_accumulation();
  accumulator_.set_requires_gradient_sync(true);
  backward({1});
  EXPECT_TRUE(accumulator_.synchronises());
  EXPECT_EQ(accumulated(), (std::vector<float>{1}));
  accumulator_.prepare_after_first_microbatch();
  accumulator_.set_requires_gradient_sync(false);
  backward({10});
  EXPECT_FALSE(accumulator_.synchronises());
  EXPECT_REFUSED(accumulator_.prepare_for_grad_accumulation());
  accumulator_.prepare_for_final_backward();
  backward({100});
  EXPECT_TRUE(accumulator_.synchronises());
  EXPECT_EQ(accumulated(), (std::vector<float>{110}));  // without the first window's
  EXPECT_EQ(accumulator_.microbatches(), 3u);
  EXPECT_REFUSED(accumulator_.set_requires_gradient_sync(true));
}

TEST_F(Accumulator, AStepWithoutAReductionAtItsEndIsRefused) {
  accumulator_.prepare_for_grad_accumulation();
  accumulator_.prepare_for_final_backward();
  accumulator_.set_requires_gradient_sync(false);
  backward({1});
  EXPECT_REFUSED(backward({1}));
  EXPECT_REFUSED(static_cast<void>(accumulator_.accumulated()));
  EXPECT_REFUSED(accumulator_.prepare_for_grad_accumulation());
}

TEST_F(Accumulator, AddsInTheReduceType) {
  GradientAccumulator narrow(*backend_, DType::bfloat16);
  narrow.prepare_for_grad_accumulation();
  for (float value : {256.0F, 1.0F, 1.0F}) {  // 257 rounds to 256
    if (narrow.microbatches() == 1) narrow.prepare_after_first_microbatch();
    if (narrow.microbatches() == 2) narrow.prepare_for_final_backward();
    narrow.backward({reinterpret_cast<std::byte*>(&value), 1, DType::float32, 0});
  }
  const Chunk chunk = narrow.accumulated();
  EXPECT_EQ(chunk.dtype, DType::bfloat16);
  EXPECT_EQ(*reinterpret_cast<const std::uint16_t*>(chunk.data), 0x4380);
}

TEST_F(Accumulator, NoneAddsNothing) {
  accumulator_.prepare_for_grad_accumulation();
  accumulator_.backward_without_gradient();
  accumulator_.prepare_after_first_microbatch();
  backward({7});
  accumulator_.prepare_for_final_backward();
  accumulator_.backward_without_gradient();
  EXPECT_FALSE(accumulator_.none());
  EXPECT_EQ(accumulated(), (std::vector<float>{7}));

  accumulator_.prepare_for_grad_accumulation();
  accumulator_.prepare_for_final_backward();
  accumulator_.backward_without_gradient();
  EXPECT_TRUE(accumulator_.none());
  EXPECT_REFUSED(static_cast<void>(accumulator_.accumulated()));
}

TEST_F(Accumulator, WhatIsOutOfOrderIsRefused) {
  EXPECT_REFUSED(backward({1}));
  EXPECT_REFUSED(accumulator_.prepare_for_final_backward());
  EXPECT_REFUSED(accumulator_.prepare_after_first_microbatch());

  accumulator_.prepare_for_grad_accumulation();
  EXPECT_REFUSED(accumulator_.prepare_for_grad_accumulation());  // the window never ended
  EXPECT_REFUSED(accumulator_.prepare_after_first_microbatch());
  backward({1});
  EXPECT_REFUSED(backward({1}));  // still the first: FP8 weights would be quantised anew
  EXPECT_REFUSED(static_cast<void>(accumulator_.accumulated()));
  accumulator_.prepare_after_first_microbatch();
  EXPECT_REFUSED(accumulator_.prepare_after_first_microbatch());
  EXPECT_REFUSED(backward({1, 2}));  // of another size
  accumulator_.prepare_for_final_backward();
  EXPECT_REFUSED(accumulator_.prepare_for_final_backward());
  backward({1});
  EXPECT_REFUSED(backward({1}));
  EXPECT_REFUSED(accumulator_.prepare_for_final_backward());
}

}  // namespace
}  // namespace gradclip::test
