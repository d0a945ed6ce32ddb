#include "gradclip/dump/chunk_filters.hpp"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

// H5Zpublic.h
constexpr int kDeflate = 1;
constexpr int kShuffle = 2;
constexpr int kFletcher32 = 3;
constexpr std::size_t kFletcherBytes = 4;

[[noreturn]] void refuse(const std::string& where, std::string found, std::string expected = {}) {
  throw Error(ExitCode::bad_input, {.where = where,
                                    .found = "a chunk " + std::move(found),
                                    .expected = std::move(expected),
                                    .advice = "the file is damaged; copy or record it again"});
}

std::vector<std::byte> inflated(const std::vector<std::byte>& stored, std::size_t size, const std::string& where) {
  std::vector<std::byte> result(size);
  z_stream stream{};
  if (inflateInit(&stream) != Z_OK) refuse(where, "cannot be inflated: zlib does not start");
  const auto* next = reinterpret_cast<const Bytef*>(stored.data());
  auto* out = reinterpret_cast<Bytef*>(result.data());
  std::size_t in_left = stored.size();
  std::size_t out_left = size;
  int status = Z_OK;
  do {  // zlib counts in 32 bits
    const auto in = static_cast<uInt>(std::min<std::size_t>(in_left, 1u << 30));
    const auto space = static_cast<uInt>(std::min<std::size_t>(out_left, 1u << 30));
    stream.next_in = const_cast<Bytef*>(next);
    stream.avail_in = in;
    stream.next_out = out;
    stream.avail_out = space;
    status = inflate(&stream, Z_NO_FLUSH);
    next += in - stream.avail_in;
    in_left -= in - stream.avail_in;
    out += space - stream.avail_out;
    out_left -= space - stream.avail_out;
  } while (status == Z_OK && (in_left != 0 || out_left != 0));
  inflateEnd(&stream);
  if (status == Z_BUF_ERROR && out_left == 0) {
    refuse(where, "inflates beyond its declared size", fmt::format("{} bytes", size));
  }
  if (status != Z_STREAM_END) refuse(where, "cannot be inflated: its deflate stream is damaged or ends early");
  if (out_left != 0) {
    refuse(where, fmt::format("inflates to {} bytes", size - out_left), fmt::format("its declared size of {}", size));
  }
  return result;
}

std::vector<std::byte> unshuffled(const std::vector<std::byte>& stored, std::size_t element_size) {
  const std::size_t elements = stored.size() / element_size;
  std::vector<std::byte> result(stored.size());
  for (std::size_t b = 0; b < element_size; ++b) {
    const std::byte* plane = stored.data() + b * elements;
    for (std::size_t i = 0; i < elements; ++i) result[i * element_size + b] = plane[i];
  }
  const std::size_t whole = elements * element_size;
  std::copy(stored.begin() + static_cast<std::ptrdiff_t>(whole), stored.end(),
            result.begin() + static_cast<std::ptrdiff_t>(whole));
  return result;
}

/// As the library computes it (H5checksum.c): big-endian 16-bit words, sums folded every 360 words.
std::uint32_t fletcher32(const std::byte* data, std::size_t size) {
  std::uint32_t sum1 = 0;
  std::uint32_t sum2 = 0;
  std::size_t words = size / 2;
  const auto byte = [&](std::size_t i) { return std::to_integer<std::uint32_t>(data[i]); };
  std::size_t at = 0;
  while (words != 0) {
    for (std::size_t block = std::min<std::size_t>(words, 360); block != 0; --block, --words, at += 2) {
      sum1 += byte(at) << 8 | byte(at + 1);
      sum2 += sum1;
    }
    sum1 = (sum1 & 0xffff) + (sum1 >> 16);
    sum2 = (sum2 & 0xffff) + (sum2 >> 16);
  }
  if (size % 2 != 0) {
    sum1 += byte(at) << 8;
    sum2 += sum1;
    sum1 = (sum1 & 0xffff) + (sum1 >> 16);
    sum2 = (sum2 & 0xffff) + (sum2 >> 16);
  }
  sum1 = (sum1 & 0xffff) + (sum1 >> 16);
  sum2 = (sum2 & 0xffff) + (sum2 >> 16);
  return sum2 << 16 | sum1;
}

void strip_fletcher32(std::vector<std::byte>& stored, const std::string& where) {
  if (stored.size() < kFletcherBytes) refuse(where, "is shorter than its fletcher32 checksum");
  const std::size_t size = stored.size() - kFletcherBytes;
  std::uint32_t recorded = 0;
  for (std::size_t i = 0; i < kFletcherBytes; ++i) {
    recorded |= std::to_integer<std::uint32_t>(stored[size + i]) << (8 * i);
  }
  const std::uint32_t actual = fletcher32(stored.data(), size);
  // Before release 1.6.3 big-endian machines swapped the bytes of each half; the library accepts both, so do we.
  const std::uint32_t swapped = (actual & 0x00ff00ffu) << 8 | (actual >> 8 & 0x00ff00ffu);
  if (recorded != actual && recorded != swapped) refuse(where, "does not match its fletcher32 checksum");
  stored.resize(size);
}

}  // namespace

bool filters_are_built_in(std::span<const hdf5::Filter> filters) noexcept {
  return std::all_of(filters.begin(), filters.end(), [](const hdf5::Filter& filter) {
    return filter.id == kDeflate || filter.id == kShuffle || filter.id == kFletcher32;
  });
}

std::vector<std::byte> decode_chunk(std::vector<std::byte> stored, std::span<const hdf5::Filter> filters,
                                    unsigned skipped_filters, std::size_t element_size, std::size_t chunk_bytes,
                                    const std::string& where) {
  for (std::size_t i = filters.size(); i-- > 0;) {
    if (i < 32 && (skipped_filters >> i & 1u) != 0) continue;
    if (filters[i].id == kFletcher32) strip_fletcher32(stored, where);
    if (filters[i].id == kShuffle) {
      const std::size_t size = filters[i].parameters.empty() ? element_size : filters[i].parameters[0];
      if (size > 1) stored = unshuffled(stored, size);
    }
    if (filters[i].id == kDeflate) {
      // Filters that were applied before this one and made the chunk longer: each fletcher32.
      const auto longer = std::count_if(filters.begin(), filters.begin() + static_cast<std::ptrdiff_t>(i),
                                        [](const hdf5::Filter& filter) { return filter.id == kFletcher32; });
      stored = inflated(stored, chunk_bytes + kFletcherBytes * static_cast<std::size_t>(longer), where);
    }
  }
  if (stored.size() != chunk_bytes) {
    refuse(where, fmt::format("holds {} bytes", stored.size()), fmt::format("its declared size of {}", chunk_bytes));
  }
  return stored;
}

}  // namespace gradclip
