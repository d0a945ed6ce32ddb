# Writes the page's style and script as C++ (src/report/html_assets.hpp), with the hashes that its policy names.
#
#   cmake -DSTYLE=page.css -DSCRIPT=page.js -DOUTPUT=html_assets.cpp -P EmbedPage.cmake
foreach(part IN ITEMS STYLE SCRIPT)
  file(READ "${${part}}" ${part}_TEXT)
  string(SHA256 ${part}_HASH "${${part}_TEXT}")
  string(FIND "${${part}_TEXT}" ")PAGE\"" ending)
  string(TOLOWER "${${part}_TEXT}" lower)
  string(FIND "${lower}" "</s" closing_tag)
  if(NOT ending EQUAL -1 OR NOT closing_tag EQUAL -1)
    message(FATAL_ERROR "${${part}} would end its literal or its element")
  endif()
endforeach()
file(CONFIGURE OUTPUT "${OUTPUT}" @ONLY CONTENT [=[
#include "gradclip/report/html_assets.hpp"

namespace gradclip {

const std::string_view kPageStyle = R"PAGE(@STYLE_TEXT@)PAGE";
const std::string_view kPageStyleHash = "@STYLE_HASH@";
const std::string_view kPageScript = R"PAGE(@SCRIPT_TEXT@)PAGE";
const std::string_view kPageScriptHash = "@SCRIPT_HASH@";

}  // namespace gradclip
]=])
