#include <fmt/format.h>

#include "commands.hpp"
#include "gradclip/report/report.hpp"
#include "gradclip/synth/synthesize.hpp"

namespace gradclip {

ExitCode run_synth(Session& session, const CommandLine& line) {
  DumpWriter writer(std::filesystem::path(), line.output, line.overwrite);
  writer.read_back(line.paranoid);
  session.check_report_path({}, line.output);
  const SynthResult made = synthesize(session.comm(), line.synth, session.threads(), line.output, writer);

  FactSection model{"model",
                    {{"model", made.model},
                     {"layers", fmt::to_string(made.layers)},
                     {"parameters", grouped(made.manifest.parameters.size())},
                     {"elements", grouped(made.elements)},
                     {"dtype", std::string(name(line.synth.dtype))},
                     {"seed", fmt::to_string(line.synth.seed)}}};
  if (!made.injected.empty()) model.facts.emplace_back("injected", made.injected);
  session.publish(FactSheet{"synth",
                            {std::move(model),
                             {"output",
                              {{"path", line.output.string()},
                               {"ranks", grouped(static_cast<std::uint64_t>(made.manifest.world_size))},
                               {"gradients", human_bytes(static_cast<double>(made.bytes))}}}}});
  return ExitCode::done;
}

}  // namespace gradclip
