#pragma once
// What became of a run that an exception ended: one message, one exit code for all processes.

#include <functional>
#include <string>

#include "gradclip/base/error.hpp"
#include "gradclip/comm/communicator.hpp"
#include "gradclip/comm/host_board.hpp"

namespace gradclip {

struct Failure {
  ExitCode code = ExitCode::bug;
  std::string message;
  bool told = false;    ///< another process has failed and speaks for all
  bool silent = false;  ///< nobody reads: no message
};

/// Of the exception being handled: Error, PeerFailed, StdoutClosed, std::bad_alloc (resources); anything else is a bug.
[[nodiscard]] Failure current_failure();

/// Agrees with the other processes on the exit code and prints the message if it is this process's turn.
/// @param comm   null if the run failed before there was one
/// @param board  on which may stand that another thread has told already
/// @param speak  what else to tell at this process's turn, if anything
[[nodiscard]] ExitCode end_run(Communicator* comm, HostBoard& board, const Failure& failure,
                               const std::function<void()>& speak = {});

}  // namespace gradclip
