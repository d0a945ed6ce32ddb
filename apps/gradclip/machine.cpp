#include "machine.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

#include "variables.hpp"

namespace gradclip {
namespace {

/// What follows "KEY:" in a file of such lines, without white space at its ends; empty if there is none.
std::string field(const std::filesystem::path& file, std::string_view key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::string_view name(line.data(), colon);
    while (!name.empty() && (name.back() == '\t' || name.back() == ' ')) name.remove_suffix(1);
    if (name != key) continue;
    std::string_view value = std::string_view(line).substr(colon + 1);
    while (!value.empty() && (value.front() == '\t' || value.front() == ' ')) value.remove_prefix(1);
    while (!value.empty() && (value.back() == '\t' || value.back() == ' ')) value.remove_suffix(1);
    return std::string(value);
  }
  return {};
}

std::optional<std::uint64_t> leading_number(std::string_view text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return number;
}

std::string first_line(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

/// The smallest limit in `file_name` of the group at `group` below `mount` and of its ancestors. In a container the
/// group may be named as the host sees it: then only the mount itself exists.
std::optional<std::uint64_t> smallest_limit(const std::filesystem::path& mount, std::filesystem::path group,
                                            const char* file_name) {
  std::optional<std::uint64_t> smallest;
  for (;;) {
    const auto limit = leading_number(first_line(mount / group / file_name));  // "max" is no number
    if (limit && (!smallest || *limit < *smallest)) smallest = limit;
    if (group.empty()) return smallest;
    group = group.parent_path();
  }
}

std::uint64_t mix(std::uint64_t hash, std::string_view text) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;  // FNV-1a
  return hash;
}

}  // namespace

Environment process_environment() {
  return [](const char* name) { return static_cast<const char*>(std::getenv(name)); };
}

std::vector<std::string> process_variables(std::string_view prefix) {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (!text.starts_with(prefix) || equals == std::string_view::npos || equals + 1 == text.size()) continue;
    names.emplace_back(text.substr(0, equals));
  }
  std::sort(names.begin(), names.end());
  return names;
}

Launch detect_launch(const Environment& environment) {
  const auto is_set = [&](const char* name) { return environment(name) != nullptr; };
  if (is_set("OMPI_COMM_WORLD_SIZE")) return {Launcher::mpi, "OMPI_COMM_WORLD_SIZE"};
  if (is_set("PMI_RANK") && is_set("PMI_SIZE")) return {Launcher::mpi, "PMI_RANK"};
  if (is_set("PMIX_RANK")) return {Launcher::mpi, "PMIX_RANK"};
  if (!is_set("RANK")) return {};
  const char* size = environment("WORLD_SIZE");
  if (size != nullptr && std::string_view(size) == "1") return {};  // nobody else does the same work
  const char* local = environment("LOCAL_RANK");
  return {Launcher::torchrun, "RANK", local == nullptr || std::string_view(local) == "0"};
}

std::uint64_t physical_memory() {
  const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || size <= 0) return std::uint64_t{1} << 32;
  return static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(size);
}

std::optional<std::uint64_t> control_group_memory_limit(const std::filesystem::path& root) {
  std::optional<std::uint64_t> smallest;
  const auto take = [&](std::optional<std::uint64_t> limit) {
    if (limit && (!smallest || *limit < *smallest)) smallest = limit;
  };
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "ID:CONTROLLERS:/PATH"
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::filesystem::path group = std::filesystem::path(line.substr(second + 1)).relative_path();
    if (controllers.empty()) {
      take(smallest_limit(root / "sys/fs/cgroup", group, "memory.max"));
      take(smallest_limit(root / "sys/fs/cgroup/unified", group, "memory.max"));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      take(smallest_limit(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
    }
  }
  // Version 1 says "unlimited" as a number near 2^63.
  if (smallest && *smallest >= (std::uint64_t{1} << 60)) return std::nullopt;
  return smallest;
}

std::uint64_t peak_memory() {
  return leading_number(field("/proc/self/status", "VmHWM")).value_or(0) * 1024;
}

std::string allowed_processors() {
  return field("/proc/self/status", "Cpus_allowed_list");
}

std::string processor_model() {
  const std::string model = field("/proc/cpuinfo", "model name");
  return model.empty() ? "unknown" : model;
}

std::string processor_features() {
  std::istringstream flags(field("/proc/cpuinfo", "flags"));
  constexpr std::array<std::string_view, 8> kInteresting{"sse4_2",  "avx",      "avx2",     "f16c",
                                                         "avx512f", "avx512bw", "avx512dq", "avx512vl"};
  std::string text;
  for (std::string flag; flags >> flag;) {
    if (std::find(kInteresting.begin(), kInteresting.end(), flag) == kInteresting.end()) continue;
    text += (text.empty() ? "" : " ") + flag;
  }
  return text.empty() ? "unknown" : text;
}

std::string host_name() {
  std::array<char, 256> name{};
  static_cast<void>(gethostname(name.data(), name.size() - 1));
  return name.data();
}

std::uint64_t host_of_process() {
  return mix(mix(0xCBF29CE484222325u, host_name()), first_line("/proc/sys/kernel/random/boot_id"));
}

std::uint64_t place_of_process() {
  return mix(host_of_process(), allowed_processors());
}

}  // namespace gradclip
