#include <fmt/format.h>

#include "commands.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/synth/synthesize.hpp"

namespace gradclip {

ExitCode run_synth(Session& session, const CommandLine& line) {
  DumpWriter writer(std::filesystem::path(), line.output, line.overwrite);
  writer.read_back(line.paranoid);
  session.check_report_path({}, line.output);
  SynthProgress progress;
  if (session.speaks()) {
    progress.begin = [&](double bytes) { progress.finish = session.begin_progress(bytes); };
  }
  const SynthResult made = synthesize(session.comm(), line.synth, session.threads(), line.output, writer, progress);
  session.end_progress();

  const auto number = [](const char* fact, std::uint64_t value) { return Fact(fact, grouped(value), {{fact, value}}); };
  FactSection model{"model",
                    {{"model", made.model},
                     number("layers", static_cast<std::uint64_t>(made.layers)),
                     number("parameters", made.manifest.parameters.size()),
                     number("elements", made.elements),
                     {"dtype", std::string(name(line.synth.dtype))},
                     {"seed", fmt::to_string(line.synth.seed), {{"seed", line.synth.seed}}}}};
  if (!made.injected.empty()) model.facts.emplace_back("injected", made.injected);
  session.publish(
      FactSheet{"synth",
                {std::move(model),
                 {"output",
                  {{"path", line.output.string()},
                   number("ranks", static_cast<std::uint64_t>(made.manifest.world_size)),
                   {"gradients", human_bytes(static_cast<double>(made.bytes)), {{"bytes", made.bytes}}}}}}});
  return ExitCode::done;
}

}  // namespace gradclip
