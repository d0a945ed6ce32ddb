// What move_to_device and ScopedModuleOffloading do to a part.

#include "gradclip/training/offload.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>

#include "deferred_backend.hpp"
#include "gradclip/base/error.hpp"

namespace gradclip::test {
namespace {

constexpr std::size_t kShard = 1000;

class Offloading : public testing::Test {
 protected:
  /// A shard on the device, filled with a letter.
  KeptShard* fill(std::int64_t part, std::int32_t rank, char letter) {
    KeptShard* shard = storage_.begin(device_, part, {rank, 0}, kShard);
    if (shard == nullptr) return nullptr;
    std::vector<char> letters(kShard, letter);
    device_.move({reinterpret_cast<std::byte*>(letters.data()), kShard, MemorySpace::host}, shard->buffer.bytes());
    shard->complete = true;
    return shard;
  }
  std::string content(std::int64_t part, std::int32_t rank) {
    const KeptShard* shard = storage_.find(part, {rank, 0});
    if (shard == nullptr) return "none";
    std::string letters(kShard, ' ');
    device_.move(shard->buffer.bytes(), {reinterpret_cast<std::byte*>(letters.data()), kShard, MemorySpace::host});
    return letters == std::string(kShard, letters[0]) ? std::string(1, letters[0]) : "mixed";
  }
  [[nodiscard]] std::size_t on_device() const { return storage_.bytes(MemorySpace::device); }
  [[nodiscard]] std::size_t on_host() const { return storage_.bytes(MemorySpace::pinned); }

  DeferredBackend device_;
  GradientStorage storage_{4 * kShard, 3 * kShard};
};

TEST_F(Offloading, MovesThereAndBackAndGivesMemoryBack) {
  fill(0, 0, 'a');
  fill(0, 1, 'b');
  fill(1, 0, 'c');
  ModelPart& part = storage_.part(0);
  move_to_device(part, device_, MemorySpace::pinned);
  EXPECT_EQ(device_.releases(), 1u);
  EXPECT_EQ(on_device(), kShard);
  EXPECT_EQ(on_host(), 2 * kShard);
  EXPECT_EQ(device_.device_bytes(), kShard);
  EXPECT_EQ(storage_.budgets().device.used(), kShard);
  EXPECT_EQ(storage_.budgets().host.used(), 2 * kShard);
  EXPECT_EQ(content(0, 0) + content(0, 1) + content(1, 0), "abc");
  move_to_device(part, device_, MemorySpace::device);
  EXPECT_EQ(on_device(), 3 * kShard);
  EXPECT_EQ(device_.pinned_bytes(), 0u);
  EXPECT_EQ(storage_.budgets().host.used(), 0u);
  EXPECT_EQ(content(0, 0) + content(0, 1) + content(1, 0), "abc");
  move_to_device(part, device_, MemorySpace::device);
  EXPECT_EQ(content(0, 0) + content(0, 1), "ab");
  EXPECT_TRUE(device_.violations().empty());
}

TEST_F(Offloading, DropsWhatFindsNoRoomInHostMemory) {
  for (const std::int32_t rank : {0, 1, 2, 3}) fill(0, rank, static_cast<char>('a' + rank));
  EXPECT_EQ(fill(0, 4, 'e'), nullptr) << "the budget is exhausted";
  move_to_device(storage_.part(0), device_, MemorySpace::pinned);
  EXPECT_EQ(content(0, 0) + content(0, 1) + content(0, 2) + content(0, 3), "abcnone");
  EXPECT_EQ(on_device(), 0u);
  EXPECT_EQ(storage_.budgets().device.used(), 0u);
}

TEST_F(Offloading, LeavesInHostMemoryWhatFindsNoRoomOnTheDevice) {
  for (const std::int32_t rank : {0, 1, 2}) fill(0, rank, static_cast<char>('a' + rank));
  move_to_device(storage_.part(0), device_, MemorySpace::pinned);
  device_.set_device_memory(kShard + kShard / 2);
  move_to_device(storage_.part(0), device_, MemorySpace::device);
  EXPECT_EQ(on_device(), kShard);
  EXPECT_EQ(on_host(), 2 * kShard);
  EXPECT_EQ(content(0, 0) + content(0, 1) + content(0, 2), "abc");
}

TEST_F(Offloading, DropsWhatWasNotFilled) {
  fill(0, 0, 'a');
  ASSERT_NE(storage_.begin(device_, 0, {1, 0}, kShard), nullptr);
  EXPECT_EQ(storage_.find(0, {1, 0}), nullptr) << "it is not whole";
  EXPECT_EQ(storage_.begin(device_, 0, {1, 0}, kShard), nullptr) << "it was begun";
  move_to_device(storage_.part(0), device_, MemorySpace::pinned);
  EXPECT_EQ(on_host(), kShard);
  EXPECT_EQ(on_device(), 0u);
}

TEST_F(Offloading, AScopeHoldsThePartOnTheDevice) {
  fill(0, 0, 'a');
  move_to_device(storage_.part(0), device_, MemorySpace::pinned);
  {
    const ScopedModuleOffloading scope(storage_.part(0), device_, true);
    EXPECT_EQ(on_device(), kShard);
    EXPECT_EQ(on_host(), 0u);
    fill(0, 1, 'b');  // a pass keeps another one
  }
  EXPECT_EQ(on_device(), 0u);
  EXPECT_EQ(content(0, 0) + content(0, 1), "ab");
}

TEST_F(Offloading, AScopeEndsWithAnExceptionToo) {
  fill(0, 0, 'a');
  try {
    const ScopedModuleOffloading scope(storage_.part(0), device_, true);
    throw std::runtime_error("a pass failed");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "a pass failed");
  }
  EXPECT_EQ(on_device(), 0u);
  EXPECT_EQ(content(0, 0), "a");
}

TEST_F(Offloading, AScopeThatIsNotEnabledDoesNothing) {
  fill(0, 0, 'a');
  const std::size_t calls = device_.calls();
  { const ScopedModuleOffloading scope(storage_.part(0), device_, false); }
  EXPECT_EQ(on_device(), kShard);
  EXPECT_EQ(device_.calls(), calls);
}

TEST_F(Offloading, AFailedMoveDropsThePart) {
  for (const auto failure : {DeferredBackend::Failure::once, DeferredBackend::Failure::late}) {
    fill(0, 0, 'a');
    fill(0, 1, 'b');
    device_.fail_at(device_.calls() + 1, failure);  // the move after the first allocation
    { const ScopedModuleOffloading scope(storage_.part(1), device_, false); }
    EXPECT_THROW(move_to_device(storage_.part(0), device_, MemorySpace::pinned), Error);
    EXPECT_EQ(on_device() + on_host(), 0u);
    EXPECT_EQ(storage_.budgets().device.used() + storage_.budgets().host.used(), 0u);

    fill(0, 0, 'a');
    {
      const ScopedModuleOffloading scope(storage_.part(0), device_, true);
      device_.fail_at(device_.calls() + 1, failure);
    }
    EXPECT_EQ(storage_.find(0, {0, 0}), nullptr);
    EXPECT_EQ(on_device() + on_host(), 0u);
  }
}

TEST_F(Offloading, NothingMovesOnTheHost) {
  const auto cpu = make_backend(DeviceChoice::cpu).backend;
  StreamOptions options;
  options.offload = true;
  ShardStream stream(*cpu, options);
  EXPECT_FALSE(offloads(stream));
  Manifest manifest;
  manifest.parameters.resize(3);
  manifest.parameters[1].model_part = 4;
  EXPECT_EQ(parts_in_turn(stream, manifest, {0, 3}), (std::vector<std::optional<std::int64_t>>{std::nullopt}));
  move_to_device(stream.storage().part(0), *cpu, MemorySpace::device);
  ShardStream on_device(device_, options);
  EXPECT_EQ(parts_in_turn(on_device, manifest, {0, 3}), (std::vector<std::optional<std::int64_t>>{0, 4}));
  EXPECT_EQ(parts_in_turn(on_device, manifest, {1, 2}), (std::vector<std::optional<std::int64_t>>{4}));
}

}  // namespace
}  // namespace gradclip::test
