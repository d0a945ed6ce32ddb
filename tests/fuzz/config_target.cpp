#include <sys/mman.h>
#include <unistd.h>

#include "expectations.hpp"
#include "options.hpp"
#include "targets.hpp"

namespace gradclip::fuzz {
namespace {

/// A file in memory, since --config takes a file's name.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view text) : descriptor_(::memfd_create("config", MFD_CLOEXEC)) {
    require(descriptor_ >= 0, "the system has files in memory");
    require(::write(descriptor_, text.data(), text.size()) == static_cast<ssize_t>(text.size()), "it was written");
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  [[nodiscard]] std::string name() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

}  // namespace

/// The first byte chooses the command.
void config(std::string_view text) {
  constexpr const char* kCommands[] = {"clip", "norms", "check", "diff", "verify", "synth"};
  if (text.empty()) return;
  const std::string command = kCommands[static_cast<unsigned char>(text[0]) % std::size(kCommands)];
  const MemoryFile file(text.substr(1));
  const std::string name = file.name();
  const char* const words[] = {"gradclip", command.c_str(), "--config", name.c_str()};
  const Environment nothing = [](const char*) -> const char* { return nullptr; };
  reads([&] { static_cast<void>(parse_command_line(std::size(words), words, nothing)); });
}

}  // namespace gradclip::fuzz
