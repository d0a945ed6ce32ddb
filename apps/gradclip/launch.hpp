#pragma once
// What may run without a launcher that gives the processes one another.

#include "machine.hpp"
#include "options.hpp"

namespace gradclip {

/// Under torchrun without an MPI launcher, help and commands that read no gradients may run, in each process anew.
/// Errors: Error(usage) for the others, PeerFailed in the processes that leave it to another one of their host to say
/// so.
void require_launcher(const Launch& launch, const CommandLine& line);

}  // namespace gradclip
