#pragma once
// The output of a run whose hosts may have storage of their own: OUT is made wherever a process writes rank files.

#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_writer.hpp"

namespace gradclip {

/// Prepares the output for every process: process 0 does, and, where the writer lets hosts have their own, the first
/// process of each that does not see process 0's. Collective. Errors: as DumpWriter::prepare().
void prepare_output(Communicator& comm, DumpWriter& output);

/// Publishes what was prepared, each OUT with the rank files that its processes wrote and the same manifest; process
/// 0's is the last, and tells that all are there. Collective. Errors: as DumpWriter::finish().
/// @param changes  of interest in process 0 alone
void finish_output(Communicator& comm, DumpWriter& output, const ManifestChanges& changes);

}  // namespace gradclip
