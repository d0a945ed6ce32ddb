#include "gradclip/clip/clip.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "commands.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/norm/findings.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/verify/checksums.hpp"

namespace gradclip {

ExitCode run_clip(Session& session, const CommandLine& line) {
  DumpReader dump = session.open(line.dump);
  TrainingStep step = training_step(dump.manifest(), line.scale);
  DumpWriter writer(dump, line.output, line.overwrite, line.resume ? Leftover::continued : Leftover::removed);
  writer.read_back(line.paranoid);
  if (session.by_locality()) writer.let_hosts_have_their_own();
  session.check_report_path(line.dump, line.output);

  Run run = session.run_over(dump, line.clip.total_norm ? 1 : measuring_passes(line) + 1);
  if (line.verify) require_recorded_files(run, session.threads());
  const std::vector<Finding> of_labels = take_label_tokens(run, line, step);
  ClipResult result = scale_grads_and_clip_grad_norm(run, step, line.clip, &writer);
  add_findings(result, of_labels);

  ReportRun facts = session.facts(line.common.numerics);
  if (line.resume) facts.kept_files = result.kept_files;
  if (session.speaks()) {
    std::optional<std::string> output;
    if (!result.refused) output = line.output.string();
    Report made =
        clip_report("clip", line.dump, dump.manifest(), step, line.clip, result, std::move(output), std::move(facts));
    session.publish(made, write_summary);
  }
  return outcome(result, dump.manifest(), line);
}

int measuring_passes(const CommandLine& line) noexcept {
  return line.clip.numerics == Numerics::automodel || line.clip.numerics == Numerics::automodel_cpu ? 2 : 1;
}

namespace {

/// The total that is not finite: the dump's, or one that recorded ranks have of their own.
std::string found_total(const ClipResult& result) {
  const auto text = [](double total) { return std::isnan(total) ? "nan" : "infinite"; };
  if (!std::isfinite(result.total) || !result.norm) return text(result.total);
  const std::vector<RankTotal>& totals = result.norm->reference.totals;
  const auto worst =
      std::find_if(totals.begin(), totals.end(), [](const RankTotal& one) { return !std::isfinite(one.total); });
  if (worst == totals.end()) return text(result.total);
  return fmt::format("{} on {}, whose own total counts other copies", text(worst->total), named_ranks(worst->ranks));
}

/// Empty where no copy is to blame that does not count.
std::string first_nonfinite_copy(std::span<const Finding> findings) {
  const auto found = std::find_if(findings.begin(), findings.end(),
                                  [](const Finding& finding) { return finding.kind == "nonfinite"; });
  if (found == findings.end()) return {};
  return fmt::format("the first parameter with NaN or infinity is {} on {}", gradclip::quoted(found->parameter),
                     named_ranks(found->ranks));
}

}  // namespace

ExitCode outcome(const ClipResult& result, const Manifest& manifest, const CommandLine& line) {
  if (result.refused) {
    ErrorText text;
    text.where = "total norm";
    text.found = found_total(result);
    text.expected = "a finite number (--nonfinite error)";
    if (result.norm) text.advice = first_nonfinite_copy(result.norm->findings);
    for (std::size_t i = 0; result.norm && i < manifest.parameters.size(); ++i) {
      const TensorStatistics& statistics = result.norm->parameters[i].statistics;
      if (statistics.nonfinite() == 0) continue;
      text.advice = "the first parameter with NaN or infinity is " + gradclip::quoted(manifest.parameters[i].name) +
                    " on rank " + std::to_string(statistics.first_nonfinite_rank);
      break;
    }
    throw Error(ExitCode::nonfinite, std::move(text));
  }
  const bool found = !result.findings.empty() || (result.norm && !result.norm->findings.empty());
  return line.common.strict && found ? ExitCode::findings : ExitCode::done;
}

}  // namespace gradclip
