#pragma once
// What a multi-process test sees of its launch.

#include "gradclip/comm/communicator.hpp"

namespace gradclip::test {

/// The communicator over all processes of the test.
Communicator& world();

}  // namespace gradclip::test
