#pragma once
// What the environment asks of the emulated machine (README.md lists the variables).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace emulation {

/// What cudaGetDeviceCount finds on the machine.
enum class Driver { present, none, old, stub, no_device, broken };

/// "name:nth[+][:code]": which call of a function fails, and how.
struct Failure {
  std::string name;
  std::uint64_t nth = 1;
  bool onwards = false;  ///< every call from the nth on
  std::optional<int> code;
};

struct Settings {
  int devices = 1;
  std::size_t memory = std::size_t{8} << 30;  ///< bytes of each device
  Driver driver = Driver::present;
  std::uint64_t order = 0;  ///< in which the threads of a block run: 0 forward, 1 reversed, else a seed
  unsigned threads = 1;     ///< host threads that share the blocks of a grid
  bool eager = false;       ///< streams run at once
  std::vector<Failure> failures;
  std::string log;      ///< file to append one line to; empty: none
  std::string process;  ///< OMPI_COMM_WORLD_RANK, or "0"
};

/// Read at the first call and never again. A value that cannot be read ends the program: a test that misspells what it
/// asks for must not pass.
const Settings& settings();

/// Prints "cuda emulation: <message>" on stderr and aborts.
[[noreturn]] void report(const std::string& message);

}  // namespace emulation
