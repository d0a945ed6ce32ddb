#include "gradclip/training/label_tokens.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "commands.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {

ExitCode run_tokens(Session& session, const CommandLine& line) {
  DumpReader dump = session.open(line.dump);
  const Manifest& manifest = dump.manifest();
  session.check_report_path(line.dump, {});
  if (line.scale.pp_axis) require_pp_axis(manifest, *line.scale.pp_axis);

  DiffRun run = session.run_over(dump, nullptr, "labels are counted in host memory");
  LabelTokens counted = count_label_tokens(dump, run.comm, plan_work(manifest, run.comm.size()),
                                           label_options(line.labels, line.scale.pp_axis, manifest.training));

  const bool found = !counted.findings.empty();
  ReportRun facts = session.facts(line.common.numerics);
  if (session.speaks()) {
    session.publish(tokens_report(line.dump, manifest, std::move(counted), std::move(facts)), write_tokens);
  }
  return line.common.strict && found ? ExitCode::findings : ExitCode::done;
}

namespace {

/// @pre the count is not complete
std::string what_is_missing(const LabelTokens& counted) {
  if (counted.coordinates_counted == 0) return "none";
  if (counted.coordinates_counted != counted.coordinates) {
    return fmt::format("none of {} of {} data-parallel coordinates", counted.coordinates - counted.coordinates_counted,
                       counted.coordinates);
  }
  return std::find_if(counted.findings.begin(), counted.findings.end(),
                      [](const Finding& finding) { return finding.kind == "labels-incomplete"; })
      ->message;
}

}  // namespace

std::vector<Finding> take_label_tokens(Run& run, const CommandLine& line, TrainingStep& step) {
  if (!line.labels.count) return {};
  const Manifest& manifest = run.dump.manifest();
  const auto refuse = [&](std::string found, std::string expected) {
    throw Error(ExitCode::bad_input,
                {.where = fmt::format("labels of {}", gradclip::quoted(run.dump.directory().string())),
                 .found = std::move(found),
                 .expected = std::move(expected),
                 .advice = "give the number itself: --num-label-tokens N"});
  };
  if (manifest.microbatch && manifest.microbatch->count != 1) {
    refuse(fmt::format("those of microbatch {} of {}", manifest.microbatch->index, manifest.microbatch->count),
           "those of the whole step");
  }
  LabelTokens counted = count_label_tokens(run.dump, run.comm, run.plan,
                                           label_options(line.labels, line.scale.pp_axis, manifest.training));
  if (!counted.complete())
    refuse(what_is_missing(counted), "labels of every coordinate and microbatch, for --num-label-tokens auto");
  step.num_label_tokens = static_cast<std::int64_t>(counted.total.label_tokens);
  return std::move(counted.findings);
}

void add_findings(ClipResult& result, const std::vector<Finding>& findings) {
  std::vector<Finding>& all = result.norm ? result.norm->findings : result.findings;
  all.insert(all.end(), findings.begin(), findings.end());
}

}  // namespace gradclip
