#pragma once
// The communicator of a run that mpirun or another MPI launcher started.

#include <memory>
#include <string>

#include "gradclip/comm/communicator.hpp"
#include "gradclip/comm/host_board.hpp"

namespace gradclip {

/// Starts MPI, which costs about half a second: a run that no launcher started takes the single-process communicator
/// instead. Its destructor ends MPI. Host and pinned memory only; counts beyond 2^31 are cut into pieces.
/// @param argc, argv  of main; the library may take its own arguments out.
/// @param board  becomes the one of the processes on this host, and hears of collectives; outlives the result
/// Errors: Error(resources) if MPI does not start.
[[nodiscard]] std::unique_ptr<Communicator> make_mpi_communicator(int* argc, char*** argv, HostBoard& board);

/// "Open MPI v4.1.4": the library that this build runs with, available without starting MPI.
[[nodiscard]] std::string mpi_library_version();

}  // namespace gradclip
