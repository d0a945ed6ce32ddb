#include "gradclip/verify/verify.hpp"

#include "commands.hpp"
#include "gradclip/report/report.hpp"
#include "locality.hpp"

namespace gradclip {
namespace {

void publish(Session& session, const CommandLine& line, const Manifest* manifest,
             const ReportVerification& verification, std::vector<Finding> findings) {
  ReportRun facts = session.facts(line.common.numerics);
  if (!session.speaks()) return;
  session.publish(verify_report(line.dump, manifest, verification, std::move(findings), std::move(facts)),
                  write_verification);
}

/// What the training step recorded of itself may be wrong too.
void take_training(const Manifest& manifest, const CommandLine& line, VerifyOptions& options) {
  try {
    const TrainingStep step = training_step(manifest, line.scale, options.complete);
    options.order = step.order;
    options.ep_axis_name = step.ep_axis_name;
    if (options.complete) options.pipeline = pipeline_view(manifest, step);
  } catch (const Error& error) {
    if (error.code() != ExitCode::bad_input) throw;
    options.ep_axis_name = line.scale.ep_axis.value_or(manifest.training.ep_axis_name.value_or(""));
    options.problems.push_back(error.text());
    options.problems.back().kind = "manifest";
  }
}

}  // namespace

ExitCode run_verify(Session& session, const CommandLine& line) {
  ManifestReading reading = examine_manifest(line.dump);
  require_one_manifest(session.comm(), line.dump, reading.manifest ? reading.manifest->text_checksum : 0);
  session.check_report_path(line.dump, {});
  if (!reading.manifest) {
    publish(session, line, nullptr, {}, manifest_findings(reading.problems));
    return ExitCode::findings;
  }

  VerifyOptions options;
  options.threads = session.threads();
  options.isolate = line.isolate;
  options.problems = std::move(reading.problems);
  options.complete = reading.complete;
  take_training(*reading.manifest, line, options);
  DumpReader dump(line.dump, std::move(*reading.manifest));
  Run run = session.run_over(dump, 1);
  const Verification found = verify_dump(run, options);

  publish(session, line, &dump.manifest(),
          {true, dump.manifest().has_checksum, found.files, found.file_checksums, found.files_compared, found.shards,
           found.shard_checksums, options.complete},
          found.findings);
  return found.findings.empty() ? ExitCode::done : ExitCode::findings;
}

}  // namespace gradclip
