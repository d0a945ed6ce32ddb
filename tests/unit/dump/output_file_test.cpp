#include "gradclip/dump/output_file.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "dump_builder.hpp"

namespace gradclip {
namespace {

/// Pieces from several threads, larger than one call and all together larger than what write-back waits for.
TEST(OutputFile, TakesPiecesFromSeveralThreads) {
  constexpr std::size_t kPiece = 700'001, kPieces = 30, kThreads = 3;
  const test::TemporaryDirectory directory;
  const auto byte_at = [](std::size_t i) { return static_cast<unsigned char>(i * 2654435761u >> 13); };
  OutputFile file(PosixFile::open_for_writing(directory / "f", true));
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::vector<unsigned char> piece(kPiece);
      for (std::size_t number = kPieces; number-- > 0;) {
        if (number % kThreads != thread) continue;
        for (std::size_t i = 0; i < kPiece; ++i) piece[i] = byte_at(number * kPiece + i);
        file.write(number * kPiece, piece.data(), kPiece);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  file.sync();
  const PosixFile written = PosixFile::open_for_reading(directory / "f");
  ASSERT_EQ(written.size(), kPiece * kPieces);
  std::vector<unsigned char> all(kPiece * kPieces);
  written.read(0, all.data(), all.size());
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < all.size(); ++i) wrong += all[i] != byte_at(i) ? 1 : 0;
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace gradclip
