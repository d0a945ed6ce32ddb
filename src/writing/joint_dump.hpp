#pragma once
// A dump that all processes of a run write together: each the files of its own recorded ranks, the manifest last.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_writer.hpp"

namespace gradclip {

/// A finished rank file as it travels between processes. Trivially copyable.
struct WrittenRank {
  WrittenRank() = default;
  WrittenRank(std::int32_t recorded_rank, const FileRecord& file)
      : rank(recorded_rank), bytes(file.bytes), xxh3_64(file.xxh3_64.value_or(0)) {}

  std::int32_t rank = 0;
  std::uint32_t kept = 0;  ///< 1: an earlier run has written it
  std::uint64_t bytes = 0;
  std::uint64_t xxh3_64 = 0;
};

/// Prepares the output, has every process write the files of its ranks into it, gathers the records of all of them, and
/// publishes with a manifest. Where any process fails, nothing is left of the output. Collective.
///
/// Process 0 prepares and publishes; where the writer lets hosts have their own, so does the first process of each that
/// does not see process 0's: each OUT then has the rank files that its processes wrote and the same manifest, and
/// process 0's is the last.
/// @param manifest    names the rank files
/// @param identity    as PartialOutput::prepare; hosts with an OUT of their own cannot continue a run
/// @param write_mine  makes files in writer, and returns them
/// @param text_of     called in process 0 alone, with the records of all rank files by name: the manifest's text
/// @return the records of all rank files, on every process
/// Errors: those of both; Error(usage) if another process has given up the run.
std::vector<WrittenRank> write_jointly(
    Communicator& comm, DumpWriter& writer, const Manifest& manifest, const std::string& identity,
    const std::function<std::vector<WrittenRank>()>& write_mine,
    const std::function<std::string(const std::map<std::string, FileRecord>&)>& text_of);

}  // namespace gradclip
