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
  std::uint32_t reserved = 0;
  std::uint64_t bytes = 0;
  std::uint64_t xxh3_64 = 0;
};

/// Prepares the output in process 0, has every process write the files of its ranks into it, and hands the records of
/// all of them to process 0, which writes the manifest and publishes. Where any process fails, nothing is left of the
/// output. Collective.
/// @param manifest    names the rank files
/// @param write_mine  makes files in writer, and returns them
/// @param finish      called in process 0 alone, with the records of all rank files by name: finishes the writer
/// Errors: those of both; Error(usage) if another process has given up the run.
void write_jointly(Communicator& comm, DumpWriter& writer, const Manifest& manifest,
                   const std::function<std::vector<WrittenRank>()>& write_mine,
                   const std::function<void(const std::map<std::string, FileRecord>&)>& finish);

}  // namespace gradclip
