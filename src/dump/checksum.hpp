#pragma once
// XXH3-64, the checksum of the format, and its spelling.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace gradclip {

/// XXH3-64 (seed 0) of bytes that come in pieces.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;

  void update(const void* data, std::size_t size) noexcept;
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  struct Free {
    void operator()(void* state) const noexcept;
  };
  std::unique_ptr<void, Free> state_;
};

[[nodiscard]] std::uint64_t xxh3_64(const void* data, std::size_t size) noexcept;

/// 16 lower-case hexadecimal digits.
[[nodiscard]] std::string checksum_text(std::uint64_t value);
/// The inverse: 1 to 16 hexadecimal digits of either case and nothing else.
[[nodiscard]] std::optional<std::uint64_t> parse_checksum(std::string_view text) noexcept;

/// Reads a whole file in blocks that stay in the cache.
/// Errors: Error(resources) naming the file.
struct FileChecksum {
  std::uint64_t bytes;
  std::uint64_t xxh3_64;
};
[[nodiscard]] FileChecksum checksum_of_file(const std::filesystem::path& path);

}  // namespace gradclip
