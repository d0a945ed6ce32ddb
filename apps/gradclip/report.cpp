#include <ostream>

#include "commands.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/text_file.hpp"
#include "gradclip/report/html.hpp"
#include "output.hpp"

namespace gradclip {
namespace {

[[noreturn]] void refuse_output(const std::filesystem::path& path, std::string found, std::string expected) {
  throw Error(ExitCode::usage, {.where = "--output " + gradclip::quoted(path.string()),
                                .found = std::move(found),
                                .expected = std::move(expected),
                                .advice = {}});
}

void check_output(const std::filesystem::path& input, const std::filesystem::path& output) {
  std::error_code error;
  if (std::filesystem::equivalent(input, output, error)) refuse_output(output, "it is the input", "another file");
  Session::check_written_path("--output", output, {});
  // A pipe or a device, /dev/stdout for one, has the name that it has.
  const bool special = std::filesystem::is_other(output, error);
  const std::string ending = output.extension().string();
  if (special || ending == ".html") return;
  refuse_output(output, ending.empty() ? "its name has no ending" : "a page is no " + ending + " file",
                "a name that ends in .html");
}

}  // namespace

ExitCode run_report(Session& session, const CommandLine& line) {
  if (!session.speaks()) return ExitCode::done;
  check_output(line.dump, line.output);
  const std::string where = "report " + gradclip::quoted(line.dump.string());
  const std::string json = read_text_file(line.dump, where, ExitCode::bad_input, kMaxJsonBytes);
  write_whole_file(line.output, [&](std::ostream& out) { write_html(json, where, out); });
  return ExitCode::done;
}

}  // namespace gradclip
