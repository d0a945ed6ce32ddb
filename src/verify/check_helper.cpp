#include "gradclip/verify/check_helper.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/verify/check_message.hpp"
#include "gradclip/verify/check_pipe.hpp"

extern char** environ;

namespace gradclip {
namespace {

constexpr char kHelperName[] = "the process that reads rank files";
constexpr char kThisProgram[] = "/proc/self/exe";

[[noreturn]] void fail_to_start(int error_number) {
  throw Error(ExitCode::resources, {.where = kHelperName,
                                    .found = fmt::format("cannot be started: {}", std::strerror(error_number)),
                                    .expected = {},
                                    .advice = "--no-isolate reads them in this process"});
}

void close_both(const std::array<int, 2>& pipe) {
  ::close(pipe[0]);
  ::close(pipe[1]);
}

/// What a file did to the process that read it.
std::string describe_end(int status) {
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU) {
    return "takes the HDF5 library more processor time than a file of its size may";
  }
  if (WIFSIGNALED(status)) {
    return fmt::format("makes the HDF5 library crash (signal {}, {})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNoMemory) return "takes more memory to be read than a file may";
  return fmt::format("ends the process that reads it (exit code {})", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

}  // namespace

void CheckHelper::start() {
  std::array<int, 2> requests{}, replies{};
  if (::pipe2(requests.data(), O_CLOEXEC) != 0) fail_to_start(errno);
  if (::pipe2(replies.data(), O_CLOEXEC) != 0) {
    const int error_number = errno;
    close_both(requests);
    fail_to_start(error_number);
  }
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  // The C library reports a damaged heap on stderr; the fault says it instead.
  ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, requests[0], STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, replies[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  // This program blocks signals to watch for them; the helper is to end by them.
  posix_spawnattr_t attributes;
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  std::string program = "gradclip";
  std::string command = kHelperCommand;
  std::string directory = dump_.directory().string();
  std::string manifest = checksum_text(dump_.manifest().text_checksum);
  char* const words[] = {program.data(), command.data(), directory.data(), manifest.data(), nullptr};
  const int status = ::posix_spawn(&process_, kThisProgram, &actions, &attributes, words, environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(requests[0]);
  ::close(replies[1]);
  requests_ = requests[1];
  replies_ = replies[0];
  if (status == 0) return;
  process_ = -1;
  stop();
  fail_to_start(status);
}

int CheckHelper::stop() noexcept {
  int status = 0;
  if (requests_ >= 0) ::close(std::exchange(requests_, -1));
  if (replies_ >= 0) ::close(std::exchange(replies_, -1));
  if (process_ < 0) return status;
  while (::waitpid(process_, &status, 0) < 0 && errno == EINTR) {
  }
  process_ = -1;
  return status;
}

RankCheck CheckHelper::check(std::int32_t rank) {
  std::error_code unknown;
  if (!std::filesystem::exists(dump_.directory() / dump_.manifest().rank_file_name(rank), unknown)) {
    return check_rank(dump_, rank);
  }
  if (process_ < 0) start();
  std::optional<IsolatedCheck> answer;
  if (write_all(requests_, &rank, sizeof rank)) answer = receive(replies_);
  if (!answer) {
    throw Error(ExitCode::resources, {.where = kHelperName,
                                      .found = describe_end(stop()),
                                      .expected = {},
                                      .advice = "--no-isolate reads them in this process"});
  }
  const auto refuse = [&](std::string found) {
    return refused_rank(dump_, rank,
                        {.found = std::move(found),
                         .expected = {},
                         .advice = "it is damaged, or made to do that: record or copy it again",
                         .kind = "unreadable"});
  };
  if (answer->status != 0) return refuse(describe_end(answer->status));
  std::optional<CheckReply> reply = unpacked_reply(answer->bytes, dump_.manifest(), rank);
  if (!reply) return refuse("makes the HDF5 library damage the process that reads it");
  if (reply->code != ExitCode::done) throw Error(reply->code, std::move(reply->error));
  return std::move(reply->check);
}

}  // namespace gradclip
