#include <csignal>
#include <memory>
#include <optional>

#include "commands.hpp"
#include "failure.hpp"

namespace {

gradclip::ExitCode run(gradclip::Session& session, const gradclip::CommandLine& line) {
  switch (line.command) {
    case gradclip::Command::clip:
      return run_clip(session, line);
    case gradclip::Command::norms:
      return run_norms(session, line);
    case gradclip::Command::inspect:
      return run_inspect(session, line);
    case gradclip::Command::verify:
      return run_verify(session, line);
    case gradclip::Command::diff:
      return run_diff(session, line);
    case gradclip::Command::check:
      return run_check(session, line);
    case gradclip::Command::merge:
      return run_merge(session, line);
    case gradclip::Command::accumulate:
      return run_accumulate(session, line);
    case gradclip::Command::tokens:
      return run_tokens(session, line);
    case gradclip::Command::synth:
      return run_synth(session, line);
    case gradclip::Command::report:
      return run_report(session, line);
    case gradclip::Command::doctor:
      return run_doctor(session, line);
  }
  return gradclip::ExitCode::bug;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace gradclip;
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is a failed write, which ends all processes alike
  std::unique_ptr<Communicator> comm;
  std::optional<Session> session;
  try {
    const Environment environment = process_environment();
    const Launch launch = detect_launch(environment);
    comm = make_communicator(launch, &argc, &argv);
    const CommandLine line = parse_command_line(argc, argv, environment);
    session.emplace(*comm, launch, line.common, environment);
    ExitCode code = ExitCode::done;
    if (line.answer) {
      session->print(*line.answer);
    } else {
      code = run(*session, line);
    }
    comm->barrier();  // here the others learn of a process that could not write its result
    return static_cast<int>(code);
  } catch (...) {
    if (session) session->end_progress();
    return static_cast<int>(end_run(comm.get(), current_failure()));
  }
}
