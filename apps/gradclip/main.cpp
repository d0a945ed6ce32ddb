#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>

#include "commands.hpp"
#include "failure.hpp"
#include "failure_report.hpp"
#include "gradclip/verify/check_helper.hpp"
#include "launch.hpp"
#include "variables.hpp"
#include "watch.hpp"

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

void warn_of_variables() {
  for (const std::string& warning :
       gradclip::variables_without_option(gradclip::process_variables(gradclip::kVariables))) {
    std::fprintf(stderr, "gradclip: warning: %s\n", warning.c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  using namespace gradclip;
  // A closed pipe and the limit of file sizes are failed writes, which end all processes alike.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  if (is_check_helper(argc, argv)) return serve_rank_checks(argv);
  HostBoard board;
  std::optional<Watch> watch;
  std::unique_ptr<Communicator> comm;
  std::optional<Session> session;
  std::optional<CommandLine> line;
  try {
    const Environment environment = process_environment();
    const Launch launch = detect_launch(environment);
    watch.emplace(board, launch);
    comm = make_communicator(launch, &argc, &argv, board);
    line = parse_command_line(argc, argv, environment);
    require_launcher(launch, *line);
    watch->limit_waiting(line->common.timeout);
    watch->tell_how_to_resume(line->resume);
    session.emplace(*comm, launch, line->common, environment);
    if (session->speaks()) warn_of_variables();
    ExitCode code = ExitCode::done;
    if (line->answer) {
      session->print(*line->answer);
    } else {
      remove_older_report(*session, *line);
      code = run(*session, *line);
    }
    comm->barrier();  // here the others learn of a process that could not write its result
    watch->stop();    // a launcher may end the others with a signal once one has returned a code
    return static_cast<int>(code);
  } catch (...) {
    if (watch) watch->give_way();
    if (session) session->end_progress();
    const Failure failure = current_failure();
    // Before the others are asked, since that may end this process; and what is told last is what stderr says.
    if (session && line) report_failure(*session, *line, failure);
    const ExitCode code = end_run(comm.get(), board, failure, [&] {
      if (!session || !line) return;
      if (comm->size() > 1) report_failure(*session, *line, failure);
      annotate_failure(*line, failure, process_environment());
    });
    if (watch) watch->stop();
    return static_cast<int>(code);
  }
}
