#include "gradclip/writing/joint_dump.hpp"

#include <span>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

std::vector<WrittenRank> written_here(DumpWriter& writer, const std::function<std::vector<WrittenRank>()>& write_mine) {
  try {
    return write_mine();
  } catch (const Error&) {
    rethrow_unless_given_up(writer.writing_directory());
  }
}

}  // namespace

void write_jointly(Communicator& comm, DumpWriter& writer, const Manifest& manifest,
                   const std::function<std::vector<WrittenRank>()>& write_mine,
                   const std::function<void(const std::map<std::string, FileRecord>&)>& finish) {
  const bool first = comm.process() == 0;
  try {
    if (first) writer.prepare();
    comm.barrier();
    const std::vector<WrittenRank> mine = written_here(writer, write_mine);
    std::map<std::string, FileRecord> files;
    for (const WrittenRank& written : gather_values(comm, std::span<const WrittenRank>(mine))) {
      files[manifest.rank_file_name(written.rank)] = {written.bytes, written.xxh3_64};
    }
    if (first) finish(files);
    comm.barrier();
  } catch (...) {
    // The process that fails may be the last one alive: it removes what all of them have written.
    writer.discard();
    throw;
  }
}

}  // namespace gradclip
