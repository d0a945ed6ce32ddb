#pragma once
// What every reader of untrusted text promises.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "gradclip/base/error.hpp"

namespace gradclip::fuzz {

inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

/// Text that may be shown on a terminal.
inline void require_printable(std::string_view text) {
  require(is_valid_utf8(text), "messages are UTF-8");
  for (const char c : text) {
    require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f, "messages have no control characters");
  }
}

/// Calls `read`. @return whether it did not refuse the text
template <class Function>
bool reads(const Function& read) {
  try {
    read();
    return true;
  } catch (const Error& error) {
    require(error.code() == ExitCode::bad_input || error.code() == ExitCode::usage, error.what());
    require_printable(error.what());
    return false;
  }
}

}  // namespace gradclip::fuzz
