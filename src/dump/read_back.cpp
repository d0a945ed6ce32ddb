#include "gradclip/dump/read_back.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"

namespace gradclip {
namespace {

constexpr std::uint64_t kReadBytes = std::uint64_t{1} << 20;

void compare(const std::string& where, std::uint64_t found, std::uint64_t computed) {
  if (found == computed) return;
  throw Error(ExitCode::resources,
              {.where = where,
               .found = "reads back with the checksum " + checksum_text(found),
               .expected = checksum_text(computed) + " (of what was computed)",
               .advice = "memory, disk or the way between them changes bits; do not trust this machine's output"});
}

/// What is in memory anyway, and lies on no disk, stays there.
void forget(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return;
  static_cast<void>(::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED));
  ::close(descriptor);
}

}  // namespace

void require_written(const std::filesystem::path& path, const FileRecord& record) {
  forget(path);
  compare(path.string(), checksum_of_file(path).xxh3_64, record.xxh3_64.value_or(0));
}

void require_written(const PosixFile& file, std::uint64_t offset, std::uint64_t bytes, const std::string& what,
                     std::uint64_t computed) {
  std::vector<std::byte> buffer(std::min(bytes, kReadBytes));
  Checksum checksum;
  for (std::uint64_t at = 0; at < bytes; at += buffer.size()) {
    const std::size_t count = std::min<std::uint64_t>(buffer.size(), bytes - at);
    file.read(offset + at, buffer.data(), count);
    checksum.update(buffer.data(), count);
  }
  compare(file.path().string() + ", " + what, checksum.digest(), computed);
}

void require_written(const RankFile& file, const StoredShard& shard, std::uint64_t computed) {
  const std::size_t size = size_of(shard.dtype);
  const std::uint64_t most = kReadBytes / size;
  std::vector<std::byte> buffer(std::min(shard.elements, most) * size);
  Checksum checksum;
  for (std::uint64_t first = 0; first < shard.elements; first += most) {
    const std::uint64_t count = std::min(most, shard.elements - first);
    file.read(shard, first, count, buffer.data());
    checksum.update(buffer.data(), count * size);
  }
  compare(file.path().string() + ", " + printable(shard.dataset), checksum.digest(), computed);
}

}  // namespace gradclip
