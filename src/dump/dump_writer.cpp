#include "gradclip/dump/dump_writer.hpp"

#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/dump/read_back.hpp"

namespace gradclip {

DumpWriter::DumpWriter(const DumpReader& input, const std::filesystem::path& output, bool overwrite, Leftover leftover)
    : input_(&input),
      output_(input.directory(), output, overwrite, OutputKind::dump, leftover),
      continues_(leftover == Leftover::continued) {}

DumpWriter::DumpWriter(const std::filesystem::path& input, const std::filesystem::path& output, bool overwrite)
    : output_(input, output, overwrite, OutputKind::dump) {}

std::optional<FinishedFile> DumpWriter::finished(std::int32_t rank) const {
  if (!continues_) return std::nullopt;
  return finished_file(output_.directory(), output_.made(), input_->manifest().rank_file_name(rank));
}

void DumpWriter::note_finished(std::int32_t rank, const FinishedFile& file) const {
  try {
    note_finished_file(output_.directory(), input_->manifest().rank_file_name(rank), file);
  } catch (const Error&) {
    rethrow_unless_given_up(output_.made());
  }
}

std::unique_ptr<RankFileWriter> DumpWriter::begin(std::shared_ptr<const RankFile> input) {
  GRADCLIP_CHECK(input_ != nullptr, "a rank file like the input's, without an input");
  const std::filesystem::path path = writing_directory() / input_->manifest().rank_file_name(input->rank());
  if (continues_) {
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
  }
  return std::make_unique<RankFileWriter>(path, std::move(input), input_->manifest());
}

void DumpWriter::finish(const ManifestChanges& changes) {
  finish_with(manifest_with(changes));
}

std::string DumpWriter::manifest_with(const ManifestChanges& changes) const {
  GRADCLIP_CHECK(input_ != nullptr, "changes of a manifest, without an input");
  return rewritten_manifest(input_->directory(), input_->manifest(), changes);
}

void DumpWriter::finish_with(const std::string& manifest) {
  GRADCLIP_CHECK(output_.prepared(), "an output that was not prepared by this process");
  try {
    const PosixFile file = PosixFile::open_for_writing(output_.made() / kManifestName, true);
    file.write(0, manifest.data(), manifest.size());
    file.sync();
    if (reads_back_) {
      require_written(file, 0, manifest.size(), "the manifest", xxh3_64(manifest.data(), manifest.size()));
    }
  } catch (const Error&) {
    rethrow_unless_given_up(output_.made());
  }
  output_.publish();
}

}  // namespace gradclip
