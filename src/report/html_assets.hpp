#pragma once
// src/report/page as it is built into the program (scripts/cmake/EmbedPage.cmake). Inside this room.

#include <string_view>

namespace gradclip {

extern const std::string_view kPageStyle;
extern const std::string_view kPageStyleHash;  ///< SHA-256, hexadecimal
extern const std::string_view kPageScript;
extern const std::string_view kPageScriptHash;

}  // namespace gradclip
