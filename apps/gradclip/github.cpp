#include "github.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <iostream>
#include <string_view>
#include <system_error>

#include "gradclip/base/error.hpp"
#include "gradclip/report/annotations.hpp"
#include "output.hpp"

namespace gradclip {
namespace {

void append_summary(const Report& report, const char* path) {
  const int descriptor = ::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  std::error_code error(descriptor < 0 ? errno : 0, std::generic_category());
  if (!error) {
    try {
      DescriptorBuffer buffer(descriptor);
      std::ostream out(&buffer);
      out.exceptions(std::ios::badbit);
      write_step_summary(report, out);
      out.flush();
    } catch (const std::system_error& failure) {
      error = failure.code();
    }
    ::close(descriptor);
  }
  if (error) {
    std::cerr << "gradclip: warning: GITHUB_STEP_SUMMARY " << gradclip::quoted(path)
              << ": cannot write: " << error.message() << std::endl;
  }
}

}  // namespace

bool is_github(const Environment& environment) {
  const char* on = environment("GITHUB_ACTIONS");
  return on != nullptr && std::string_view(on) == "true";
}

void tell_github(const Report& report, const Environment& environment) {
  if (!is_github(environment)) return;
  write_annotations(report, std::cerr);
  std::cerr.flush();
  const char* path = environment("GITHUB_STEP_SUMMARY");
  if (path != nullptr && *path != '\0') append_summary(report, path);
}

}  // namespace gradclip
