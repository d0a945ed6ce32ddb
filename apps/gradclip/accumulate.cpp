#include "gradclip/training/accumulate.hpp"

#include <fmt/format.h>

#include <utility>

#include "commands.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {

ExitCode run_accumulate(Session& session, const CommandLine& line) {
  std::vector<std::unique_ptr<DumpReader>> dumps;
  dumps.push_back(std::make_unique<DumpReader>(line.dump));
  for (const std::filesystem::path& dump : line.more_dumps) dumps.push_back(std::make_unique<DumpReader>(dump));
  order_microbatches(dumps);
  DumpWriter writer(*dumps[0], line.output, line.overwrite);
  writer.read_back(line.paranoid);
  for (const std::unique_ptr<DumpReader>& dump : dumps) {
    const DumpWriter checked(*dump, line.output, line.overwrite);  // OUT is none of the inputs
    session.check_report_path(dump->directory(), line.output);
  }

  DiffRun run = session.run_over(*dumps[0], nullptr, "gradients are accumulated in host memory");
  const auto progress = [&](std::uint64_t bytes) {
    if (run.progress) run.progress(bytes / dumps.size());
  };
  const AccumulateResult result = accumulate_microbatches(dumps, session.comm(), *session.backend().backend,
                                                          line.accumulate, session.threads(), writer, progress);
  session.end_progress();

  const auto type = [](const std::optional<DType>& dtype, const char* otherwise) {
    return std::string(dtype ? name(*dtype) : otherwise);
  };
  session.publish(FactSheet{
      "accumulate",
      {{"accumulated",
        {{"microbatches", grouped(result.microbatches)},
         {"parameters", grouped(dumps[0]->manifest().parameters.size())},
         {"reduced over ranks", grouped(result.reduced)},
         {"reduce dtype", type(line.accumulate.reduce_dtype, "float32 (float64 for float64)")},
         {"dtype", type(line.accumulate.storage_dtype, "the reduce dtype")}}},
       {"output", {{"path", line.output.string()}, {"gradients", human_bytes(static_cast<double>(result.bytes))}}}}});
  return ExitCode::done;
}

}  // namespace gradclip
