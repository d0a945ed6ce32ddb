#include "ledger.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

#include "settings.hpp"

namespace emulation {
namespace {

struct Ledger {
  std::mutex mutex;
  std::map<std::string, std::uint64_t> calls;
  std::function<std::string()> describe;
};

Ledger& ledger() {
  static auto* const the_ledger = new Ledger;  // never destroyed: written after every static object of the program
  return *the_ledger;
}

/// After the destructors of all static objects, so that what they still hold does not count as left.
[[gnu::destructor]] void write_log() {
  Ledger& book = ledger();
  if (book.calls.empty() || settings().log.empty()) return;
  std::string line = "process=" + settings().process + " pid=" + std::to_string(getpid());
  if (book.describe) line += " " + book.describe();
  for (const auto& [name, calls] : book.calls) line += " " + name + "=" + std::to_string(calls);
  line += "\n";
  // One write, so that the lines of several processes do not mix.
  const int file = open(settings().log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (file < 0 || write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    report("cannot write " + settings().log);
  }
  close(file);
}

}  // namespace

std::optional<int> count_call(const std::string& name, int default_code) {
  Ledger& book = ledger();
  const std::lock_guard lock(book.mutex);
  const std::uint64_t nth = ++book.calls[name];
  for (const Failure& failure : settings().failures) {
    if (failure.name != name) continue;
    if (failure.onwards ? nth >= failure.nth : nth == failure.nth) return failure.code.value_or(default_code);
  }
  return std::nullopt;
}

std::uint64_t calls_of(const std::string& name) {
  Ledger& book = ledger();
  const std::lock_guard lock(book.mutex);
  return book.calls[name];
}

void describe_at_exit(std::function<std::string()> describe) {
  Ledger& book = ledger();
  const std::lock_guard lock(book.mutex);
  book.describe = std::move(describe);
}

}  // namespace emulation
