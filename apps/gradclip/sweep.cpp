#include "gradclip/clip/sweep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <string>

#include "commands.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/verify/checksums.hpp"

namespace gradclip {
namespace {

/// One dump, measured.
struct Step {
  ReportSweepStep facts;
  StepTotal total;
  std::uint64_t bytes = 0;
  std::vector<Finding> findings;
};

/// What goes wrong with one of several dumps says with which.
template <class Function>
auto naming(const std::filesystem::path& dump, const Function& function) {
  try {
    return function();
  } catch (const Error& error) {
    ErrorText text = error.text();
    if (text.where.find(dump.string()) == std::string::npos) {
      text.where =
          fmt::format("dump {}{}{}", gradclip::quoted(dump.string()), text.where.empty() ? "" : ", ", text.where);
    }
    throw Error(error.code(), std::move(text), error.location());
  }
}

class Sweep {
 public:
  Sweep(Session& session, const CommandLine& line) : session_(session), line_(line) {}

  Step measure(const std::filesystem::path& path) {
    DumpReader dump = session_.open(path);
    TrainingStep step = training_step(dump.manifest(), line_.scale);
    step.max_norm.reset();  // of no account here
    Run run = session_.run_over(dump, measuring_passes(line_));
    if (line_.verify) require_recorded_files(run, session_.threads());
    const std::vector<Finding> of_labels = take_label_tokens(run, line_, step);
    ClipResult result = scale_grads_and_clip_grad_norm(run, step, line_.clip, nullptr);
    add_findings(result, of_labels);

    const ReportDump head = report_dump(path, dump.manifest());
    Step measured{{head.path, head.step, result.order.p, result.norm->total, result.norm->findings.size()},
                  step_total(result, line_.common.numerics),
                  head.bytes,
                  result.norm->findings};
    for (Finding& finding : measured.findings) {
      finding.message = gradclip::quoted(head.path) + ": " + finding.message;
    }
    try {
      code_ = std::max(code_, naming(path, [&] { return outcome(result, dump.manifest(), line_); }));
    } catch (const Error&) {  // --nonfinite error: said after the report is written
      if (!refusal_) refusal_ = std::current_exception();
    }
    return measured;
  }

  /// Throws the first refusal, if there was one.
  [[nodiscard]] ExitCode finish() const {
    if (refusal_) std::rethrow_exception(refusal_);
    return code_;
  }

 private:
  Session& session_;
  const CommandLine& line_;
  ExitCode code_ = ExitCode::done;
  std::exception_ptr refusal_;
};

bool earlier(const Step& a, const Step& b) {
  constexpr std::int64_t kLast = std::numeric_limits<std::int64_t>::max();
  return a.facts.step.value_or(kLast) < b.facts.step.value_or(kLast);
}

Report sweep_report(std::vector<Step> steps, const std::vector<double>& max_norms, ReportRun run) {
  Report report;
  report.command = "norms";
  report.run = std::move(run);
  ReportSweep& result = report.sweep.emplace();
  std::vector<StepTotal> totals;
  for (Step& step : steps) {
    result.steps.push_back(std::move(step.facts));
    result.nonfinite += step.total.finite() ? 0 : 1;
    totals.push_back(std::move(step.total));
    report.dump.bytes += step.bytes;
    report.findings.insert(report.findings.end(), step.findings.begin(), step.findings.end());
  }
  result.lines = sweep(totals, max_norms);
  return report;
}

}  // namespace

ExitCode run_sweep(Session& session, const CommandLine& line) {
  std::vector<std::filesystem::path> dumps{line.dump};
  dumps.insert(dumps.end(), line.more_dumps.begin(), line.more_dumps.end());
  for (const std::filesystem::path& dump : dumps) session.check_report_path(dump, {});

  Sweep measuring(session, line);
  std::vector<Step> steps;
  for (const std::filesystem::path& dump : dumps) {
    steps.push_back(naming(dump, [&] { return measuring.measure(dump); }));
  }
  std::stable_sort(steps.begin(), steps.end(), earlier);

  ReportRun facts = session.facts(line.common.numerics);
  if (session.speaks()) session.publish(sweep_report(std::move(steps), line.sweep, std::move(facts)), write_sweep);
  return measuring.finish();
}

}  // namespace gradclip
