#pragma once
// Whole messages through pipes, between a process and its helper (check_helper.hpp). Inside this room.

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace gradclip {

/// @return whether all bytes came before the other end closed
inline bool read_all(int descriptor, void* to, std::size_t count) noexcept {
  auto* next = static_cast<char*>(to);
  while (count != 0) {
    const ssize_t got = ::read(descriptor, next, count);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    next += got;
    count -= static_cast<std::size_t>(got);
  }
  return true;
}

/// @return whether the other end is open still. @pre SIGPIPE is ignored
inline bool write_all(int descriptor, const void* from, std::size_t count) noexcept {
  const auto* next = static_cast<const char*>(from);
  while (count != 0) {
    const ssize_t put = ::write(descriptor, next, count);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    next += put;
    count -= static_cast<std::size_t>(put);
  }
  return true;
}

/// The exit code of a process that asked for more memory than it may use.
inline constexpr int kNoMemory = 5;

/// How the process ended that checked a rank (as waitpid() says it), and what it wrote.
struct IsolatedCheck {
  int status = 0;
  std::string bytes;
};

[[nodiscard]] inline bool send(int descriptor, const IsolatedCheck& check) noexcept {
  const std::int64_t head[] = {check.status, static_cast<std::int64_t>(check.bytes.size())};
  return write_all(descriptor, head, sizeof head) && write_all(descriptor, check.bytes.data(), check.bytes.size());
}

/// Empty: the other end closed.
[[nodiscard]] inline std::optional<IsolatedCheck> receive(int descriptor) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 30;
  std::int64_t head[2];
  if (!read_all(descriptor, head, sizeof head) || head[1] < 0 || head[1] > kMostBytes) return std::nullopt;
  IsolatedCheck check{static_cast<int>(head[0]), std::string(static_cast<std::size_t>(head[1]), '\0')};
  if (!read_all(descriptor, check.bytes.data(), check.bytes.size())) return std::nullopt;
  return check;
}

}  // namespace gradclip
