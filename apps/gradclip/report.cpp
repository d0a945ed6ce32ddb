#include <algorithm>
#include <array>
#include <ostream>

#include "commands.hpp"
#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/posix_file.hpp"
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
  constexpr std::array<std::string_view, 3> kOthers{".json", ".csv", ".xml"};
  const std::string ending = output.extension().string();
  if (std::find(kOthers.begin(), kOthers.end(), ending) != kOthers.end()) {
    refuse_output(output, "a page is no " + ending + " file", "a name that ends in .html");
  }
  std::error_code error;
  if (std::filesystem::is_directory(output, error)) refuse_output(output, "it is a directory", "a file's name");
  if (std::filesystem::equivalent(input, output, error)) refuse_output(output, "it is the input", "another file");
}

std::string read_text(const std::filesystem::path& path, const std::string& where) {
  const PosixFile file = PosixFile::open_for_reading(path);
  if (file.size() > kMaxJsonBytes) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = "has " + std::to_string(file.size()) + " bytes",
                                      .expected = "at most " + std::to_string(kMaxJsonBytes),
                                      .advice = {}});
  }
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

}  // namespace

ExitCode run_report(Session& session, const CommandLine& line) {
  if (!session.speaks()) return ExitCode::done;
  check_output(line.dump, line.output);
  const std::string where = "report " + gradclip::quoted(line.dump.string());
  const std::string json = read_text(line.dump, where);
  write_whole_file(line.output, [&](std::ostream& out) { write_html(json, where, out); });
  return ExitCode::done;
}

}  // namespace gradclip
