#include "gradclip/comm/host_board.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace gradclip {
namespace {

/// How the system calls the state of a process: 'R', 'S', 'T' (stopped), 'Z' (ended). Empty: there is none.
std::optional<char> state_of(std::int32_t id) {
  std::ifstream file(fmt::format("/proc/{}/stat", id));
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  const std::size_t end = text.rfind(')');  // of its name, which may hold anything
  if (end == std::string::npos || end + 2 >= text.size()) return std::nullopt;
  return text[end + 2];
}

bool is_gone(const std::optional<char>& state) {
  return !state || *state == 'Z' || *state == 'X';
}

bool is_stopped(const std::optional<char>& state) {
  return state && (*state == 'T' || *state == 't');
}

std::int64_t now() noexcept {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

}  // namespace

void HostBoard::share(HostBoardMemory& memory, int place, int process) noexcept {
  memory_ = &memory;
  place_ = place;
  if (static_cast<std::size_t>(place) >= HostBoardMemory::kMostProcesses) return;
  HostBoardMemory::Place& mine = memory.places[static_cast<std::size_t>(place)];
  mine.process = process;
  mine.id = ::getpid();
}

void HostBoard::unshare() noexcept {
  leave();
  own_.voice = memory().voice.load();
  place_ = 0;
  memory_ = &own_;
}

bool HostBoard::claim_voice() noexcept {
  std::uint32_t expected = silent;
  return memory().voice.compare_exchange_strong(expected, claimed);
}

bool HostBoard::agree_on_voice() noexcept {
  std::uint32_t expected = silent;
  return memory().voice.compare_exchange_strong(expected, agreed) || expected == agreed;
}

void HostBoard::leave() noexcept {
  const auto place = static_cast<std::size_t>(place_.load());
  if (place < HostBoardMemory::kMostProcesses) memory().places[place].id = 0;
}

bool HostBoard::all_have_left() const {
  const auto& places = memory().places;
  return std::all_of(places.begin(), places.end(), [](const HostBoardMemory::Place& place) {
    const std::int32_t id = place.id;
    if (id == 0) return true;
    const std::optional<char> state = state_of(id);
    return is_gone(state) || is_stopped(state);
  });
}

std::string HostBoard::who_does_not_run() const {
  for (const HostBoardMemory::Place& place : memory().places) {
    const std::int32_t id = place.id;
    if (id == 0) continue;
    const std::optional<char> state = state_of(id);
    if (!is_gone(state) && !is_stopped(state)) continue;
    return fmt::format("process {} (pid {}) {}", place.process.load(), id,
                       is_gone(state) ? "is gone: it was killed, perhaps for its memory" : "is stopped");
  }
  return {};
}

void HostBoard::note_waiting(bool waiting) noexcept {
  waiting_since_ = waiting ? now() : 0;
}

std::optional<std::chrono::nanoseconds> HostBoard::waiting() const noexcept {
  const std::int64_t since = waiting_since_;
  if (since == 0) return std::nullopt;
  return std::chrono::steady_clock::duration(now() - since);
}

}  // namespace gradclip
