#pragma once
// Text of a dump inside other languages: what they take for syntax becomes text again. Control characters, invalid
// UTF-8 and characters that reorder or hide text are printable()'s everywhere.

#include <string>
#include <string_view>

namespace gradclip {

/// printable() of every line; line feeds stay.
[[nodiscard]] std::string printable_lines(std::string_view text);

/// In an XML element or a double-quoted attribute. Characters that XML 1.0 forbids cannot stand there in any spelling:
/// U+FFFE and U+FFFF become U+FFFD. Line ends stay.
[[nodiscard]] std::string xml_text(std::string_view text);

/// The message of a GitHub workflow command: % and line ends.
[[nodiscard]] std::string annotation_text(std::string_view text);
/// A property of one ("title=..."): also : and ,
[[nodiscard]] std::string annotation_property(std::string_view text);

/// In a cell of a markdown table: everything that markdown, HTML or GitHub's links could take for theirs is a character
/// reference.
[[nodiscard]] std::string markdown_text(std::string_view text);

}  // namespace gradclip
