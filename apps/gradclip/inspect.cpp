#include "commands.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {

ExitCode run_inspect(Session& session, const CommandLine& line) {
  session.check_report_path(line.dump, {});
  const Manifest manifest = read_manifest(line.dump);
  if (session.speaks()) session.publish(inspect_report(line.dump, manifest), write_contents);
  return ExitCode::done;
}

}  // namespace gradclip
