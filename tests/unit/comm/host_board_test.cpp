#include "gradclip/comm/host_board.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <thread>

namespace gradclip {
namespace {

struct Host {
  std::unique_ptr<HostBoardMemory> memory = std::make_unique<HostBoardMemory>();
  HostBoard a, b;

  Host() {
    a.share(*memory, 0, 4);
    b.share(*memory, 1, 5);
  }
};

TEST(HostBoard, OneProcessSpeaks) {
  Host host;
  EXPECT_TRUE(host.b.claim_voice());
  EXPECT_FALSE(host.a.claim_voice());
  EXPECT_FALSE(host.b.claim_voice());
  EXPECT_FALSE(host.a.agree_on_voice()) << "another one has told already";
}

TEST(HostBoard, WhoAgreedIsNotInterrupted) {
  Host host;
  EXPECT_TRUE(host.a.agree_on_voice());
  EXPECT_TRUE(host.b.agree_on_voice());
  EXPECT_FALSE(host.a.claim_voice());
}

TEST(HostBoard, RemembersWhatWasSaidWhenItsMemoryGoes) {
  Host host;
  EXPECT_TRUE(host.a.claim_voice());
  host.b.unshare();
  host.memory.reset();
  EXPECT_FALSE(host.b.claim_voice());
}

TEST(HostBoard, NamesAProcessThatDoesNotRun) {
  Host host;
  EXPECT_EQ(host.a.who_does_not_run(), "");
  const pid_t other = ::fork();
  if (other == 0) {
    for (;;) ::pause();
  }
  host.memory->places[1].id = other;
  EXPECT_EQ(host.a.who_does_not_run(), "");
  EXPECT_FALSE(host.b.all_have_left());
  host.a.leave();
  EXPECT_FALSE(host.b.all_have_left()) << "the other one runs";
  int status = 0;
  ::kill(other, SIGSTOP);
  ::waitpid(other, &status, WUNTRACED);
  EXPECT_TRUE(host.b.all_have_left()) << "nobody waits for a process that is stopped";
  EXPECT_EQ(host.a.who_does_not_run(), "process 5 (pid " + std::to_string(other) + ") is stopped");
  ::kill(other, SIGKILL);
  ::waitpid(other, &status, 0);
  EXPECT_NE(host.a.who_does_not_run().find("process 5 (pid " + std::to_string(other) + ") is gone"), std::string::npos);
  host.memory->places[1].id = ::getpid();
  host.b.leave();
  EXPECT_EQ(host.a.who_does_not_run(), "");
}

TEST(HostBoard, KnowsHowLongItsProcessHasWaited) {
  HostBoard board;
  EXPECT_FALSE(board.waiting());
  board.note_waiting(true);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  ASSERT_TRUE(board.waiting());
  EXPECT_GE(*board.waiting(), std::chrono::milliseconds(5));
  board.note_waiting(false);
  EXPECT_FALSE(board.waiting());
}

}  // namespace
}  // namespace gradclip
