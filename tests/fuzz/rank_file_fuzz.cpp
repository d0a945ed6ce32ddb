// Damaged rank files through the process that reads them apart (src/verify/check_helper.hpp), and what that process
// accepted once more here, in a fork that stands for the command itself.
//
//   rank_file_fuzz DUMP EXECUTIONS SEED     damages the rank files of a sound dump, one to three damages each
//
// The library is no part of the build, so that nothing guides the damages: they keep to the first kilobytes, where
// small files have their metadata. Prints how often each outcome came; a file that crashes the second reader is kept in
// the current directory. Exit code 1 if a check ended otherwise than its header says.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/verify/check_helper.hpp"
#include "mutation.hpp"
#include "temporary_directory.hpp"

namespace gradclip::fuzz {
namespace {

constexpr std::size_t kMetadataBytes = 8192;

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// What the command does with a file after it was checked: every gradient found and read.
void read_again(DumpReader& dump, std::int32_t rank, const RankCheck& check) {
  const std::shared_ptr<const RankFile> file = dump.rank_file(rank);
  std::size_t unusable = 0;
  std::vector<std::byte> bytes;
  for (std::size_t p = 0; p < dump.manifest().parameters.size(); ++p) {
    if (!dump.manifest().holds(dump.manifest().parameters[p], rank)) continue;
    if (unusable < check.unusable.size() && check.unusable[unusable].parameter == p) {
      ++unusable;
      continue;
    }
    const StoredShard& shard = file->locate(p);
    bytes.resize(shard.elements * size_of(shard.dtype));
    if (!shard.none) file->read(shard, 0, shard.elements, bytes.data());
  }
}

/// How a fork of this process that reads the file ends, as waitpid() says it.
int read_in_fork(DumpReader& dump, std::int32_t rank, const RankCheck& check) {
  const pid_t process = ::fork();
  if (process == 0) {
    ::alarm(20);
    std::freopen("/dev/null", "w", stderr);
    try {
      read_again(dump, rank, check);
    } catch (const Error&) {
      ::_exit(3);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(process, &status, 0);
  return status;
}

class Fuzzer {
 public:
  Fuzzer(const std::filesystem::path& seeds, std::uint64_t seed) : mutator_(seed) {
    std::filesystem::copy(seeds, folder_ / "dump");
    dump_.emplace(folder_ / "dump");
    for (std::int32_t rank = 0; rank < dump_->manifest().world_size; ++rank) {
      originals_.push_back(read_file(path(rank)));
    }
    helper_.emplace(*dump_);
  }

  void execute(std::uint64_t number) {
    const auto rank = static_cast<std::int32_t>(number % originals_.size());
    const std::string& original = originals_[static_cast<std::size_t>(rank)];
    const std::size_t head = std::min(original.size(), kMetadataBytes);
    const std::string damaged = mutator_.overwritten(original.substr(0, head)) + original.substr(head);
    write_file(path(rank), damaged);
    const RankCheck check = helper_->check(rank);
    ++outcomes_[outcome(check)];
    if (check.readable) read_after(rank, check, damaged, number);
  }

  void report() const {
    for (const auto& [name, count] : outcomes_) std::printf("%9llu  %s\n", count, name.c_str());
  }

 private:
  [[nodiscard]] std::filesystem::path path(std::int32_t rank) const {
    return dump_->directory() / dump_->manifest().rank_file_name(rank);
  }

  static std::string outcome(const RankCheck& check) {
    for (const Fault& fault : check.faults) {
      for (const char* word :
           {"crash (signal", "processor time", "more memory", "ends the process", "damage the process"}) {
        const std::size_t at = fault.message.find(word);
        if (at == std::string::npos) continue;
        return "ended its process: " + fault.message.substr(at, fault.message.find(';', at) - at);
      }
    }
    return check.readable ? "read, faults or none" : "refused as a whole";
  }

  void read_after(std::int32_t rank, const RankCheck& check, const std::string& bytes, std::uint64_t number) {
    const int status = read_in_fork(*dump_, rank, check);
    if (!WIFSIGNALED(status)) return;
    ++outcomes_[std::string("AFTERWARDS read by the command, which ended by ") + ::strsignal(WTERMSIG(status))];
    write_file("crash-" + std::to_string(number) + ".h5", bytes);
  }

  test::TemporaryDirectory folder_;
  std::optional<DumpReader> dump_;
  std::optional<CheckHelper> helper_;
  std::vector<std::string> originals_;
  Mutator mutator_;
  std::map<std::string, unsigned long long> outcomes_;
};

}  // namespace
}  // namespace gradclip::fuzz

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  if (gradclip::is_check_helper(argc, argv)) return gradclip::serve_rank_checks(argv);
  if (argc != 4) {
    std::fprintf(stderr, "usage: rank_file_fuzz DUMP EXECUTIONS SEED\n");
    return 2;
  }
  gradclip::fuzz::Fuzzer fuzzer(argv[1], std::strtoull(argv[3], nullptr, 10));
  const std::uint64_t executions = std::strtoull(argv[2], nullptr, 10);
  try {
    for (std::uint64_t number = 0; number < executions; ++number) fuzzer.execute(number);
  } catch (const gradclip::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  fuzzer.report();
  return 0;
}
