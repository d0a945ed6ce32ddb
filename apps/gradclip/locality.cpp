#include "locality.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/norm/findings.hpp"
#include "machine.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kHostsShown = 8;

using HostName = std::array<char, 64>;

HostName name_of_this_host() {
  HostName name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) name = {"?"};
  return name;
}

std::string host(const HostName& name) {
  return printable(name.data());
}

/// A rank file as a process sees it. Trivially copyable.
struct SeenFile {
  std::int32_t rank = 0;
  std::uint32_t view = 0;
  std::uint64_t bytes = 0;
};

/// The directory is listed once: asking for every rank's file would ask for those of all hosts, too.
std::vector<SeenFile> seen_files(const DumpReader& dump) {
  std::unordered_set<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(dump.directory(), error), end; !error && entry != end;
       entry.increment(error)) {
    names.insert(entry->path().filename().string());
  }
  std::vector<SeenFile> seen;
  for (std::int32_t rank = 0; rank < dump.manifest().world_size; ++rank) {
    const std::string name = dump.manifest().rank_file_name(rank);
    struct stat status {};
    if (names.count(name) == 0 || ::stat((dump.directory() / name).c_str(), &status) != 0) continue;
    seen.push_back({rank, 0, static_cast<std::uint64_t>(status.st_size)});
  }
  return seen;
}

/// What a process tells of itself. Trivially copyable.
struct Viewer {
  std::uint64_t host = 0;
  std::uint64_t files = 0;  ///< hash of what it sees
  HostName name{};
};

[[noreturn]] void refuse_other_size(const DumpReader& dump, const SeenFile& a, const HostName& host_a,
                                    const SeenFile& b, const HostName& host_b) {
  throw Error(ExitCode::bad_input, {.where = (dump.directory() / dump.manifest().rank_file_name(a.rank)).string(),
                                    .found = fmt::format("has {} bytes on host {} and {} on host {}", a.bytes,
                                                         host(host_a), b.bytes, host(host_b)),
                                    .expected = "one file, or copies of it (--locality files)",
                                    .advice = "remove the copies that are not of this dump"});
}

[[noreturn]] void refuse_unseen(const DumpReader& dump, const std::vector<std::int32_t>& unseen,
                                const std::set<std::string>& hosts) {
  throw Error(ExitCode::bad_input,
              {.where = dump.directory().string(),
               .found = fmt::format("no host sees the files of {}", named_ranks(unseen)),
               .expected = fmt::format("every rank file on one of the hosts {}", fmt::join(hosts, ", ")),
               .advice = "start a process on the host that has them, or copy them to one of these",
               .kind = "missing"});
}

std::string summary_of(const WorkPlan& plan, const std::vector<Viewer>& viewers) {
  std::map<std::string, std::size_t> ranks;
  for (int process = 0; process < plan.processes(); ++process) {
    ranks[host(viewers[static_cast<std::size_t>(process)].name)] += plan.ranks(process).size();
  }
  std::vector<std::string> parts;
  for (const auto& [name, count] : ranks) {
    if (parts.size() == kHostsShown) break;
    parts.push_back(fmt::format("{} serves {}", name, count));
  }
  const std::string more = ranks.size() > kHostsShown ? fmt::format(", {} more", ranks.size() - kHostsShown) : "";
  return fmt::format("by the rank files that {} {}: {}{}", ranks.size(), ranks.size() == 1 ? "host sees" : "hosts see",
                     fmt::join(parts, ", "), more);
}

}  // namespace

void require_one_manifest(Communicator& comm, const std::filesystem::path& directory, std::uint64_t text_checksum) {
  struct Seen {
    std::uint64_t checksum;
    HostName name;
  };
  const std::vector<Seen> all = gather_value(comm, Seen{text_checksum, name_of_this_host()});
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const Seen& one) { return one.checksum != all[0].checksum; });
  if (other == all.end()) return;
  throw Error(ExitCode::bad_input,
              {.where = (directory / kManifestName).string(),
               .found = fmt::format("process {} (host {}) read another manifest than process 0 (host {})",
                                    other - all.begin(), host(other->name), host(all[0].name)),
               .expected = "one dump, the same for all processes, that nobody changes",
               .advice = "give all of them one directory; where hosts have storage of their own, use norms or clip "
                         "with --locality files"});
}

Manifest manifest_of_first(Communicator& comm, const std::filesystem::path& directory) {
  std::string text;
  if (comm.process() == 0) text = read_manifest_text(directory);
  text = broadcast_string(comm, std::move(text), 0);

  struct Other {
    std::uint32_t differs;
    HostName name;
  };
  std::error_code error;
  const bool has_one = std::filesystem::exists(directory / kManifestName, error);
  const bool differs = comm.process() != 0 && has_one && read_manifest_text(directory) != text;
  const std::vector<Other> all = gather_value(comm, Other{differs ? 1U : 0U, name_of_this_host()});
  std::set<std::string> others;
  for (const Other& one : all) {
    if (one.differs != 0) others.insert(host(one.name));
  }
  if (!others.empty()) {
    throw Error(ExitCode::bad_input,
                {.where = (directory / kManifestName).string(),
                 .found = fmt::format("is another one on the hosts {}", fmt::join(others, ", ")),
                 .expected = fmt::format("what host {} has, or none (--locality files)", host(all[0].name)),
                 .advice = "these are directories of different dumps"});
  }
  return parse_manifest(text, (directory / kManifestName).string());
}

LocalWork plan_local_work(Communicator& comm, const DumpReader& dump) {
  std::vector<SeenFile> mine = seen_files(dump);
  Viewer viewer{host_of_process(), 0, name_of_this_host()};
  Checksum hash;
  hash.update(mine.data(), mine.size() * sizeof(SeenFile));
  viewer.files = hash.digest();
  const std::vector<Viewer> viewers = gather_value(comm, viewer);

  // Of processes that see the same, the first tells.
  RankSight sight;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::size_t> known;
  std::vector<std::size_t> teller;
  for (std::size_t process = 0; process < viewers.size(); ++process) {
    const auto [place, is_new] = known.emplace(std::pair(viewers[process].host, viewers[process].files), teller.size());
    if (is_new) teller.push_back(process);
    sight.view_of.push_back(place->second);
  }
  const auto me = static_cast<std::size_t>(comm.process());
  if (teller[sight.view_of[me]] != me) mine.clear();
  for (SeenFile& file : mine) file.view = static_cast<std::uint32_t>(sight.view_of[me]);

  sight.views.resize(teller.size());
  std::vector<std::optional<SeenFile>> first(static_cast<std::size_t>(dump.manifest().world_size));
  for (const SeenFile& file : gather_values(comm, std::span<const SeenFile>(mine))) {
    std::optional<SeenFile>& earlier = first[static_cast<std::size_t>(file.rank)];
    if (!earlier) earlier = file;
    if (earlier->bytes != file.bytes) {
      refuse_other_size(dump, *earlier, viewers[teller[earlier->view]].name, file, viewers[teller[file.view]].name);
    }
    sight.views[file.view].push_back(file.rank);
  }
  std::vector<std::int32_t> unseen;
  for (std::size_t rank = 0; rank < first.size(); ++rank) {
    if (!first[rank]) unseen.push_back(static_cast<std::int32_t>(rank));
  }
  if (!unseen.empty()) {
    std::set<std::string> hosts;
    for (const Viewer& one : viewers) hosts.insert(host(one.name));
    refuse_unseen(dump, unseen, hosts);
  }
  WorkPlan plan = plan_work(dump.manifest(), sight);
  std::string summary = summary_of(plan, viewers);
  return {std::move(plan), std::move(summary)};
}

}  // namespace gradclip
