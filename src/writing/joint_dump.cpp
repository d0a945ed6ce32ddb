#include "gradclip/writing/joint_dump.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <span>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

void prepare(Communicator& comm, DumpWriter& writer, const std::string& identity) {
  if (!writer.several()) {
    if (comm.process() == 0) writer.prepare(identity);
    comm.barrier();
    return;
  }
  std::random_device random;
  const std::string signature = broadcast_string(comm, fmt::format("hosts {:08x}{:08x}", random(), random()), 0);
  // One at a time, and before the others look: shared storage may remember for a while that there was nothing.
  for (int next = 0; next < comm.size();) {
    if (comm.process() == next) writer.prepare(signature);
    comm.barrier();
    const std::vector<std::uint8_t> ready = gather_value<std::uint8_t>(comm, writer.is_prepared_as(signature) ? 1 : 0);
    next = static_cast<int>(std::find(ready.begin(), ready.end(), 0) - ready.begin());
  }
}

/// @param text  of process 0
void finish(Communicator& comm, DumpWriter& writer, const std::string& text) {
  const bool first = comm.process() == 0;
  if (!writer.several()) {
    if (first) writer.finish_with(text);
    comm.barrier();
    return;
  }
  const std::string manifest = broadcast_string(comm, text, 0);
  try {
    if (!first && writer.prepared()) writer.finish_with(manifest);
    comm.barrier();
    if (first) writer.finish_with(manifest);
    comm.barrier();
  } catch (...) {
    writer.withdraw();
    throw;
  }
}

std::vector<WrittenRank> written_here(DumpWriter& writer, const std::function<std::vector<WrittenRank>()>& write_mine) {
  try {
    return write_mine();
  } catch (const Error&) {
    rethrow_unless_given_up(writer.writing_directory());
  }
}

}  // namespace

std::vector<WrittenRank> write_jointly(
    Communicator& comm, DumpWriter& writer, const Manifest& manifest, const std::string& identity,
    const std::function<std::vector<WrittenRank>()>& write_mine,
    const std::function<std::string(const std::map<std::string, FileRecord>&)>& text_of) {
  try {
    prepare(comm, writer, identity);
    const std::vector<WrittenRank> mine = written_here(writer, write_mine);
    std::vector<WrittenRank> all = gather_values(comm, std::span<const WrittenRank>(mine));
    std::map<std::string, FileRecord> files;
    for (const WrittenRank& written : all) {
      files[manifest.rank_file_name(written.rank)] = {written.bytes, written.xxh3_64};
    }
    finish(comm, writer, comm.process() == 0 ? text_of(files) : std::string());
    return all;
  } catch (...) {
    // The process that fails may be the last one alive: it removes what all of them have written.
    writer.discard();
    throw;
  }
}

}  // namespace gradclip
