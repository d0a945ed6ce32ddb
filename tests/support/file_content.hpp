#pragma once
// A file as text.

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace gradclip::test {

/// All bytes of a file, read at once: tests are not optimised, and a loop over characters would be most of their time.
inline std::string file_content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string content(static_cast<std::size_t>(std::filesystem::file_size(path)), '\0');
  file.read(content.data(), static_cast<std::streamsize>(content.size()));
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return content;
}

}  // namespace gradclip::test
