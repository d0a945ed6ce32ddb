#include "gradclip/verify/checksums.hpp"

#include <fmt/format.h>

#include "gradclip/base/worker_pool.hpp"
#include "gradclip/dump/checksum.hpp"

namespace gradclip {

std::optional<ErrorText> check_whole_file(const std::filesystem::path& directory, const Manifest& manifest,
                                          std::int32_t rank) {
  const std::string name = manifest.rank_file_name(rank);
  const auto record = manifest.files.find(name);
  if (record == manifest.files.end()) return std::nullopt;
  const std::filesystem::path path = directory / name;
  // A file of another length needs no reading.
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  ErrorText text{.where = path.string(), .kind = "checksum"};
  if (!error && bytes != record->second.bytes) {
    text.found = fmt::format("has {} bytes", bytes);
    text.expected = fmt::format("{} (by the manifest)", record->second.bytes);
    return text;
  }
  if (!record->second.xxh3_64) return std::nullopt;
  const FileChecksum found = checksum_of_file(path);
  if (found.xxh3_64 == *record->second.xxh3_64) return std::nullopt;
  text.found = "has the checksum " + checksum_text(found.xxh3_64);
  text.expected = checksum_text(*record->second.xxh3_64) + " (by the manifest)";
  return text;
}

void require_recorded_files(Run& run, std::size_t threads) {
  const Manifest& manifest = run.dump.manifest();
  if (!manifest.has_checksum) {
    throw Error(ExitCode::bad_input, {.where = (run.dump.directory() / kManifestName).string(),
                                      .found = "it has no checksum of itself",
                                      .expected = "one, with --verify",
                                      .advice = "run without --verify: nothing vouches for what it says"});
  }
  const std::span<const std::int32_t> ranks = run.plan.ranks(run.comm.process());
  parallel_for(ranks.size(), threads, [&](std::size_t index, std::size_t) {
    const std::int32_t rank = ranks[index];
    const std::string name = manifest.rank_file_name(rank);
    const auto record = manifest.files.find(name);
    if (record == manifest.files.end() || !record->second.xxh3_64) {
      throw Error(ExitCode::bad_input, {.where = (run.dump.directory() / name).string(),
                                        .found = "the manifest has no checksum of it",
                                        .expected = "one for every rank file, with --verify",
                                        .advice = "run without --verify: nothing vouches for the bits"});
    }
    std::optional<ErrorText> wrong = check_whole_file(run.dump.directory(), manifest, rank);
    if (!wrong) return;
    wrong->advice = "the file was changed or damaged after it was recorded; gradclip verify says where";
    throw Error(ExitCode::bad_input, std::move(*wrong));
  });
  run.comm.barrier();  // nobody goes on to write before all files are known to be good
}

}  // namespace gradclip
