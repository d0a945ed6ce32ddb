#pragma once
// Streams to descriptors that notice every failed write, and files that are whole or absent.

#include <array>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <streambuf>
#include <string>
#include <string_view>
#include <system_error>

namespace gradclip {

/// Writes through to a descriptor, which it does not own. A failed write throws from the stream that uses it, if that
/// has std::ios::badbit among its exceptions(): std::system_error with the error number.
class DescriptorBuffer : public std::streambuf {
 public:
  explicit DescriptorBuffer(int descriptor);

 protected:
  int_type overflow(int_type character) override;
  int sync() override;
  std::streamsize xsputn(const char* text, std::streamsize size) override;

 private:
  void write_out(const char* text, std::size_t size);

  int descriptor_;
  std::array<char, 65536> buffer_;
};

/// Where a file at `path` is or will be: absolute, behind symbolic links, one whose target is not there yet too.
[[nodiscard]] std::filesystem::path resolved_path(const std::filesystem::path& path, std::error_code& error);

/// Has `write` fill the file: a temporary one beside it, then renamed. A symlink's target is replaced or made, not the
/// link; devices and pipes are written straight. Errors: Error(resources) with `path` and the system's reason; no file
/// is left. @param what  the file is, for messages
void write_whole_file(const std::filesystem::path& path, const std::function<void(std::ostream&)>& write,
                      std::string_view what = "report");

/// Removes the temporary files that this process is writing, for a thread that ends it. Thread-safe, nothrow.
void discard_unfinished_files() noexcept;

}  // namespace gradclip
