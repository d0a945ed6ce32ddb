#include "settings.hpp"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace emulation {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

template <class Number>
Number number_from(std::string_view text, const std::string& of) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    report(of + ": \"" + std::string(text) + "\" is not a number");
  }
  return value;
}

template <class Number>
void read(const char* name, Number& value) {
  const std::string text = variable(name);
  if (!text.empty()) value = number_from<Number>(text, name);
}

Driver read_driver() {
  const std::string text = variable("GRADCLIP_EMULATION_DRIVER");
  constexpr std::pair<std::string_view, Driver> kNames[] = {
      {"", Driver::present},  {"none", Driver::none},           {"old", Driver::old},
      {"stub", Driver::stub}, {"no-device", Driver::no_device}, {"broken", Driver::broken},
  };
  for (const auto& [name, driver] : kNames) {
    if (name == text) return driver;
  }
  report("GRADCLIP_EMULATION_DRIVER=" + text + ": none, old, stub, no-device or broken");
}

/// Cuts the text before the first `separator` off the front.
std::string_view cut(std::string_view& rest, char separator) {
  const std::size_t end = rest.find(separator);
  const std::string_view front = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  return front;
}

/// "name:nth[+][:code][@process]" and more of it after commas.
std::vector<Failure> read_failures(const std::string& process) {
  const std::string variable_name = "GRADCLIP_EMULATION_FAIL";
  const std::string text = variable(variable_name.c_str());
  std::vector<Failure> failures;
  std::string_view rest = text;
  while (!rest.empty()) {
    std::string_view where = cut(rest, ',');
    std::string_view what = cut(where, '@');
    if (!where.empty() && where != process) continue;
    Failure failure;
    failure.name = cut(what, ':');
    std::string_view nth = cut(what, ':');
    failure.onwards = nth.ends_with('+');
    if (failure.onwards) nth.remove_suffix(1);
    failure.nth = number_from<std::uint64_t>(nth, variable_name);
    if (!what.empty()) failure.code = number_from<int>(what, variable_name);
    failures.push_back(std::move(failure));
  }
  return failures;
}

Settings read_settings() {
  Settings read_now;
  read("GRADCLIP_EMULATION_DEVICES", read_now.devices);
  read("GRADCLIP_EMULATION_MEMORY", read_now.memory);
  read("GRADCLIP_EMULATION_ORDER", read_now.order);
  read("GRADCLIP_EMULATION_THREADS", read_now.threads);
  int eager = 0;
  read("GRADCLIP_EMULATION_EAGER", eager);
  read_now.eager = eager != 0;
  read_now.driver = read_driver();
  const std::string process = variable("OMPI_COMM_WORLD_RANK");
  read_now.process = process.empty() ? "0" : process;
  read_now.failures = read_failures(read_now.process);
  read_now.log = variable("GRADCLIP_EMULATION_LOG");
  if (read_now.devices < 1 || read_now.devices > 16) report("GRADCLIP_EMULATION_DEVICES: 1 to 16");
  if (read_now.threads < 1 || read_now.threads > 64) report("GRADCLIP_EMULATION_THREADS: 1 to 64");
  return read_now;
}

}  // namespace

const Settings& settings() {
  static const auto* const all = new Settings(read_settings());  // never destroyed: the log is written after main
  return *all;
}

void report(const std::string& message) {
  std::fprintf(stderr, "cuda emulation: %s\n", message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace emulation
