#include "gradclip/dump/checksum.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <charconv>
#include <new>
#include <vector>

#include "gradclip/dump/posix_file.hpp"

namespace gradclip {
namespace {

XXH3_state_t* as_state(void* state) noexcept {
  return static_cast<XXH3_state_t*>(state);
}

}  // namespace

void Checksum::Free::operator()(void* state) const noexcept {
  XXH3_freeState(as_state(state));
}

Checksum::Checksum() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_64bits_reset(as_state(state_.get()));
}
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

void Checksum::update(const void* data, std::size_t size) noexcept {
  if (size != 0) XXH3_64bits_update(as_state(state_.get()), data, size);
}

std::uint64_t Checksum::digest() const noexcept {
  return XXH3_64bits_digest(as_state(state_.get()));
}

std::uint64_t xxh3_64(const void* data, std::size_t size) noexcept {
  static constexpr char kNothing = 0;
  return XXH3_64bits(size == 0 ? &kNothing : data, size);
}

std::string checksum_text(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

std::optional<std::uint64_t> parse_checksum(std::string_view text) noexcept {
  std::uint64_t value = 0;
  if (text.empty() || text.size() > 16) return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

FileChecksum checksum_of_file(const std::filesystem::path& path) {
  constexpr std::size_t kBlock = std::size_t{256} << 10;
  const PosixFile file = PosixFile::open_for_reading(path);
  std::vector<std::byte> block(kBlock);
  Checksum checksum;
  std::uint64_t bytes = 0;
  while (const std::size_t got = file.read_some(bytes, block.data(), kBlock)) {
    checksum.update(block.data(), got);
    bytes += got;
  }
  return {bytes, checksum.digest()};
}

}  // namespace gradclip
