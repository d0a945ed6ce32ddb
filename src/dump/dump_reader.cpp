#include "gradclip/dump/dump_reader.hpp"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>

#include "gradclip/dump/manifest_text.hpp"

namespace gradclip {
namespace {

// More cost more than they save: HDF5 keeps half a megabyte for each, and a list of them that it walks at every
// opening.
constexpr std::size_t kMostOpen = 128;
constexpr std::size_t kKeptForOthers = 64;
constexpr std::size_t kDescriptorsPerFile = 2;  // HDF5's and ours

/// How many rank files may be open at once, with room for files that are still held when another takes their place.
std::size_t open_file_capacity() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 16;
  if (limit.rlim_cur < limit.rlim_max) {
    rlimit raised = limit;
    raised.rlim_cur = std::min<rlim_t>(limit.rlim_max, kKeptForOthers + 2 * kDescriptorsPerFile * kMostOpen);
    if (raised.rlim_cur > limit.rlim_cur && ::setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  const std::size_t available = limit.rlim_cur == RLIM_INFINITY ? kMostOpen * 8 : limit.rlim_cur;
  const std::size_t usable = available > kKeptForOthers ? available - kKeptForOthers : 0;
  return std::clamp<std::size_t>(usable / (2 * kDescriptorsPerFile), 1, kMostOpen);
}

}  // namespace

DumpReader::DumpReader(std::filesystem::path directory)
    : directory_(std::move(directory)),
      manifest_file_(identify(directory_ / kManifestName)),
      manifest_(read_manifest(directory_)),
      capacity_(open_file_capacity()) {}

DumpReader::DumpReader(std::filesystem::path directory, Manifest manifest)
    : directory_(std::move(directory)),
      manifest_file_(identify(directory_ / kManifestName)),
      manifest_(std::move(manifest)),
      capacity_(open_file_capacity()) {}

std::shared_ptr<const RankFile> DumpReader::rank_file(std::int32_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = open_.find(rank); found != open_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second);
    return recent_.front();
  }
  const bool left_out_whole = left_out_ranks_.count(rank) != 0;
  if (!left_out_whole) {
    const std::filesystem::path path = path_of(rank);
    const auto [before, first_time] = opened_.emplace(rank, identify(path));
    if (!first_time) require_same(path, before->second);
  }
  auto file = left_out_whole ? std::make_shared<const RankFile>(manifest_, rank)
                             : std::make_shared<const RankFile>(directory_, manifest_, rank);
  if (const auto left_out = left_out_.find(rank); left_out != left_out_.end()) {
    for (const std::size_t parameter : left_out->second) file->leave_out(parameter);
  }
  while (recent_.size() >= capacity_) {
    open_.erase(recent_.back()->rank());
    recent_.pop_back();
  }
  recent_.push_front(file);
  open_[rank] = recent_.begin();
  return file;
}

std::filesystem::path DumpReader::path_of(std::int32_t rank) const {
  return directory_ / manifest_.rank_file_name(rank);
}

DumpReader::Identity DumpReader::identify(const std::filesystem::path& file) {
  struct stat status {};
  // A file that is missing is told of by whoever opens it.
  if (::stat(file.c_str(), &status) != 0) return {};
  return {static_cast<std::uint64_t>(status.st_dev), static_cast<std::uint64_t>(status.st_ino),
          static_cast<std::uint64_t>(status.st_size), status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

void DumpReader::require_same(const std::filesystem::path& file, const Identity& before) {
  const Identity now = identify(file);
  if (now == before) return;
  if (now == Identity{}) refuse_changed_file(file, "was removed while it was read");
  const bool same_file = now.inode == before.inode && now.device == before.device;
  refuse_changed_file(file, same_file ? "was written to while it was read" : "was replaced while it was read");
}

void DumpReader::require_unchanged() {
  const std::lock_guard<std::mutex> lock(mutex_);
  require_same(directory_ / kManifestName, manifest_file_);
  for (const auto& [rank, before] : opened_) require_same(path_of(rank), before);
}

void DumpReader::leave_out(std::int32_t rank, std::size_t parameter) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_out_[rank].push_back(parameter);
  if (const auto found = open_.find(rank); found != open_.end()) (*found->second)->leave_out(parameter);
}

void DumpReader::leave_out(std::int32_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_out_ranks_.insert(rank);
  if (const auto found = open_.find(rank); found != open_.end()) {
    recent_.erase(found->second);
    open_.erase(found);
  }
}

}  // namespace gradclip
