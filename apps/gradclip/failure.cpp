#include "failure.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <new>
#include <system_error>

#include "session.hpp"

namespace gradclip {

Failure current_failure() {
  try {
    throw;
  } catch (const Error& error) {
    std::string message = error.what();
    if (error.code() == ExitCode::bug) {
      message += fmt::format(" ({}:{})", error.location().file_name(), error.location().line());
    }
    return {error.code(), std::move(message)};
  } catch (const PeerFailed& peer) {
    return {.code = peer.code, .message = {}, .told = true};
  } catch (const StdoutClosed&) {
    return {.code = ExitCode::resources, .message = "stdout was closed", .silent = true};
  } catch (const std::bad_alloc&) {
    return {ExitCode::resources, "out of memory; a smaller --memory-budget or fewer processes may help"};
  } catch (const std::system_error& error) {  // of files and threads too
    return {ExitCode::resources, printable(error.what())};
  } catch (const std::exception& error) {
    return {ExitCode::bug, "unexpected: " + printable(error.what()) + "; please report this with the command line"};
  } catch (...) {
    return {ExitCode::bug, "unexpected exception; please report this with the command line"};
  }
}

ExitCode end_run(Communicator* comm, HostBoard& board, const Failure& failure, const std::function<void()>& speak) {
  if (failure.told) return failure.code;
  Agreement agreement{failure.code, true};
  if (comm != nullptr) agreement = comm->abort(failure.code, failure.message);
  agreement.speaks = agreement.speaks && board.agree_on_voice();
  if (agreement.speaks && !failure.silent) {
    std::fprintf(stderr, "gradclip: error: %s\n", failure.message.c_str());
  }
  if (agreement.speaks && speak) speak();
  return agreement.code;
}

}  // namespace gradclip
