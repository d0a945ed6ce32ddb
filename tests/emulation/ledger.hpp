#pragma once
// Counts what is called, says which call is to fail, and writes the log when the process ends.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace emulation {

/// Counts one call of `name`; the error code if the environment asks this one to fail.
/// @param default_code  where the environment names none.
std::optional<int> count_call(const std::string& name, int default_code);

/// Calls of `name` so far.
std::uint64_t calls_of(const std::string& name);

/// Adds `describe()`, "key=value" pairs, to the line that is written when the process ends.
void describe_at_exit(std::function<std::string()> describe);

}  // namespace emulation
