#pragma once
// A report as one HTML page for people: charts, findings and a table in a single file that loads nothing. Its own style
// and script stand in it, and a content security policy lets the browser run these alone and reach no network.

#include <iosfwd>
#include <string>
#include <string_view>

#include "gradclip/report/report.hpp"

namespace gradclip {

/// The page of a JSON report. @param where  the file, for messages
/// Errors: Error(bad_input) with file and key, for text that is no report of this version; nothing is written then.
void write_html(std::string_view json, const std::string& where, std::ostream& out);

/// The page of the JSON that write_json() makes of the report.
void write_html(const Report& report, std::ostream& out);

}  // namespace gradclip
